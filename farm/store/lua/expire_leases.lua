-- Take the attempts away whose leases ended; a lost attempt is charged.
-- Nothing expires until this reaper has itself written here for one whole lease without a gap: after an outage every
-- worker gets a lease's time to renew. A gap is half a lease: whoever renewed before it still holds a quarter.
-- keys: reaper:<reaper>, leases, job:<job> with :cells :attempts :log, active:…, pool:…, build:…, stopping, wake:…
-- arguments: reaper, limit
-- answer: ids of the jobs whose attempts were lost
local mark = key("reaper", reaper)
local seen = call("HMGET", mark, "since", "last")
local since = tonumber(seen[1] or NOW)
if not seen[2] or NOW - tonumber(seen[2]) > LEASE / 2 then since = NOW end
call("HSET", mark, "since", since, "last", NOW)
call("PEXPIRE", mark, LEASE)
if NOW - since < LEASE then return {} end

local lost = call("ZRANGEBYSCORE", key("leases"), "-inf", NOW, "LIMIT", 0, limit)
for _, id in ipairs(lost) do
  local job = read(id)
  if not job or job.state ~= "running" then
    call("ZREM", key("leases"), id)
  else
    local message = "worker " .. job.worker .. " on node " .. job.node .. " stopped renewing its lease"
    local outcome = cjson.encode({["end"] = "lost", kind = "worker_lost", message = message})
    end_attempt(job, "lost", outcome)
    charge(job, cells_of(job), "worker_lost", outcome)
  end
end
return lost
