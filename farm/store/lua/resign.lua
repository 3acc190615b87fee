-- Release the leader's lease.
-- keys: leader
-- arguments: process
-- answer: 1 if it was the leader, else 0
if call("GET", key("leader")) ~= process then return 0 end
return call("DEL", key("leader"))
