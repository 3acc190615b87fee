-- Fail jobs that waited longer than `timeout` for a pool while none of its live workers took jobs.
-- keys: unserved, pool:<pool>:workers :waiting :handed, worker:<worker>, node:<node>, job:<job> with :cells, active:…,
--   build:…, stopping, wake:…
-- arguments: pool, timeout, limit
--   timeout: milliseconds
-- answer: the number of jobs that failed
local why = unserved_because(pool)
if not why then
  call("HDEL", FARM .. "unserved", pool)
  return 0
end
call("HSETNX", FARM .. "unserved", pool, NOW)
if NOW - call("HGET", FARM .. "unserved", pool) < tonumber(timeout) then return 0 end
local count = 0
for _, where in ipairs({"waiting", "handed"}) do
  for _, id in ipairs(call("ZRANGEBYSCORE", POOL .. pool .. ":" .. where, "-inf", NOW - timeout, "LIMIT", 0, limit)) do
    local job = read(id)
    local seconds = math.floor(timeout / 1000)
    local message = "no worker has taken jobs of pool " .. pool .. " for " .. seconds .. " s: " .. why
    local outcome = cjson.encode({["end"] = "failed", kind = "toolchain_mismatch", message = message})
    end_job(job, cells_of(job), "failed", outcome, "toolchain_mismatch")
    count = count + 1
  end
end
return count
