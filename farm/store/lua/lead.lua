-- Take or keep the leader's lease.
-- keys: leader
-- arguments: process, ttl
-- answer: 1 for the leader, else 0
local leader = call("GET", FARM .. "leader")
if leader and leader ~= process then return 0 end
call("SET", FARM .. "leader", process, "PX", ttl)
return 1
