-- A worker is gone for good.
-- keys: worker:<worker>, workers, pool:<pool>:workers
-- arguments: worker
-- answer: 1 when it was there, else 0
local pools = call("HGET", key("worker", worker), "pools")
call("ZREM", key("workers"), worker)
if not pools then return 0 end
for _, pool in ipairs(cjson.decode(pools)) do call("ZREM", key("pool", pool, "workers"), worker) end
call("DEL", key("worker", worker))
return 1
