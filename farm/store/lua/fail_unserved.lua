-- Fail jobs that waited longer than `timeout` for a pool while none of its live workers took jobs.
-- keys: unserved, pool:<pool>:workers :waiting :handed, worker:<worker>, node:<node>, job:<job> with :cells, active:…,
--   build:…, stopping, wake:…
-- arguments: pool, timeout, limit
--   timeout: milliseconds
-- answer: the number of jobs that failed

-- Why no worker of the pool takes jobs; nil if one does, and if one rests because object storage is away: that
-- is the whole farm's trouble, and costs no job.
local function unserved_because()
  local why = "none is live"
  for _, worker in ipairs(call("ZRANGEBYSCORE", POOL .. pool .. ":workers", NOW, "+inf")) do
    local found = call("HMGET", WORKER .. worker, "slots", "node", "draining")
    if found[1] then
      local reason = found[3] == "1" and "it drains" or rests(worker, found[2])
      if reason == "" or reason:find("^object storage") then return nil end
      why = "node " .. found[2] .. " takes none: " .. reason
    end
  end
  return why
end

local why = unserved_because()
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
