-- The epoch names one life of one server: after a restart, a failover or a loss, writes may be missing.
-- keys: epoch
-- arguments: server, fresh
--   server: the run id of the server that answers; fresh: the epoch to begin if the run id is another one than before
-- answer: the epoch
local found = call("HMGET", FARM .. "epoch", "server", "epoch")
if found[1] == server then return found[2] end
call("HSET", FARM .. "epoch", "server", server, "epoch", fresh)
return fresh
