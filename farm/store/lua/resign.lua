-- Release the leader's lease.
-- keys: leader
-- arguments: process
-- answer: none
if call("GET", FARM .. "leader") == process then call("DEL", FARM .. "leader") end
