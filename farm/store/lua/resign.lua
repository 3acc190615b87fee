-- Release the leader's lease.
-- keys: leader
-- arguments: process
-- answer: 1 if it was the leader, else 0
if call("GET", FARM .. "leader") ~= process then return 0 end
return call("DEL", FARM .. "leader")
