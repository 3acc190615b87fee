-- Register a worker, again or for the first time; its pools are kept for good.
-- keys: worker:<worker> with :last, workers, pools, pool:<pool>:workers, wake:pools, node:<node> with :passed,
--   worker:locks:<kernel>
-- arguments: ttl, document, pools, resting, fenced
--   ttl: milliseconds for which it counts as live without a heartbeat; document: JSON, kept unchanged;
--   pools: JSON list of [name, JSON]; resting: why it takes no jobs yet, "" = it takes jobs;
--   fenced: why its node is fenced as far as the worker knows, or ""
-- answer: none
local about = cjson.decode(document)
local worker, node, locks = about.id, about.node, about.locks or ""
local names = {}
for _, pool in ipairs(cjson.decode(pools)) do
  names[#names + 1] = pool[1]
  call("HSET", FARM .. "pools", pool[1], pool[2])
  call("ZADD", POOL .. pool[1] .. ":workers", NOW + ttl, worker)
  wake(pool[1])
end
call("HSET", WORKER .. worker, "node", node, "slots", about.slots, "ttl", ttl, "document", document,
     "pools", cjson.encode(names), "registered_at", NOW, "resting", resting, "locks", locks)
call("PEXPIRE", WORKER .. worker, ttl)
note_heard(worker, node)
note_locks(worker, locks, ttl)
call("ZADD", FARM .. "workers", NOW + ttl, worker)
-- Redis may have lost the fence with its data. If the fence was lifted since the worker's last heartbeat, it stays
-- lifted.
if fenced ~= "" and call("HEXISTS", NODE .. node, "let_back") == 0 then fence(node, fenced) end
