-- A worker is alive. The answer says if it is idle while its pools have work: then it consumes no messages.
-- keys: worker:<worker> with :last :running, workers, pool:<pool>:workers :handed, job:<job>, node:<node>,
--   worker:locks:<kernel>, wake:pools
-- arguments: worker, draining, resting, warning
--   draining: 1 if it takes no more jobs; resting: why it takes none for now, "" = it takes jobs; warning: what else is
--   wrong there, or ""
-- answer: ["ok" or "drain" or "unknown" (register again), its running attempts, milliseconds for which it has left a
--   job of its pools unclaimed, why its node is fenced or "", jobs that failed there in a row in ways that the node
--   may have caused]
local record = WORKER .. worker
local found = call("HMGET", record, "ttl", "pools", "drain", "node", "resting", "busy_at", "locks")
if not found[1] then return {"unknown", 0, 0, "", 0} end
local dies = NOW + tonumber(found[1])
local rested = (found[5] or "") ~= ""
call("HSET", record, "resting", resting, "warning", warning)
note_heard(worker, found[4])
note_locks(worker, found[7] or "", found[1])
if draining == "1" then call("HSET", record, "draining", "1") end
call("HSET", record, "seen_at", NOW)
call("PEXPIRE", record, found[1])
call("ZADD", FARM .. "workers", dies, worker)
local oldest = NOW
for _, pool in ipairs(cjson.decode(found[2])) do
  call("ZREMRANGEBYSCORE", POOL .. pool .. ":workers", "-inf", NOW)
  call("ZADD", POOL .. pool .. ":workers", dies, worker)
  if rested and resting == "" then wake(pool) end
  local first = call("ZRANGE", POOL .. pool .. ":handed", 0, 0, "WITHSCORES")
  if first[2] then oldest = math.min(oldest, tonumber(first[2])) end
end
local node = call("HMGET", NODE .. found[4], "fenced", "row")
-- A job may wait for hours behind others: only the time since the worker's last attempt counts.
oldest = math.max(oldest, tonumber(found[6] or 0))
local running = #running_of(worker, true)
return {found[3] == "1" and "drain" or "ok", running, NOW - oldest, node[1] or "", tonumber(node[2] or 0)}
