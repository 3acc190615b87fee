-- A worker is there, again or for the first time; its pools are remembered for good.
-- keys: worker:<worker>, workers, pools, pool:<pool>:workers, wake:pools, node:<node> with :passed
-- arguments: worker, node, slots, ttl, document, pools, resting, fenced
--   ttl: milliseconds that it lives without a heartbeat; document: JSON; pools: JSON list of [name, JSON];
--   resting: why it takes no jobs yet, "" = it does; fenced: why its node was fenced when it was last heard of here,
--   or ""
-- answer: 1
local names = {}
for _, pool in ipairs(cjson.decode(pools)) do
  names[#names + 1] = pool[1]
  call("HSET", key("pools"), pool[1], pool[2])
  call("ZADD", key("pool", pool[1], "workers"), NOW + ttl, worker)
  wake(pool[1])
end
call("HSET", key("worker", worker), "node", node, "slots", slots, "ttl", ttl, "document", document,
     "pools", cjson.encode(names), "registered_at", NOW, "resting", resting)
call("PEXPIRE", key("worker", worker), ttl)
call("ZADD", key("workers"), NOW + ttl, worker)
-- Redis may have lost it with its data; where the node was let back since the worker last heard, it is lifted.
if fenced ~= "" and call("HEXISTS", key("node", node), "let_back") == 0 then fence(node, fenced) end
return 1
