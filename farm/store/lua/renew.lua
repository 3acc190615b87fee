-- A worker reports that its attempt is alive, and its progress.
-- keys: job:<job> with :cells :log, leases, kept, pool:<pool>:left, build:<build>:events
-- arguments: job, token, phase, progress, detail, paused, log, kept, left
--   progress: a number, or "" if it is unknown; log: the last part of the attempt's log, "" = as before;
--   paused: for so many milliseconds another program was measured on its host, "" = as before;
--   kept: 1 if its finished program is on the node's disk; left: 1 if it only uploads, and its slot has the next
-- answer: "ok", "cancel" (nobody wants it any more: end it, then finish) or "lost" (another attempt has the job)
local id = job
local job = read(id)
if not job or job.state ~= "running" or job.token ~= token then return "lost" end
if kept == "1" or job.kept then
  -- The program outlives its worker: the process that finds it on that disk publishes it and ends the attempt.
  call("ZREM", FARM .. "leases", id)
  call("ZADD", FARM .. "kept", NOW + HOLD, id)
  call("HSET", JOB .. id, "kept", "1")
else
  call("ZADD", FARM .. "leases", NOW + LEASE, id)
end
if left == "1" then call("SADD", POOL .. job.pool .. ":left", id) end
if log ~= "" then call("SET", JOB .. id .. ":log", log) end
call("HSET", JOB .. id, "phase", phase, "progress", progress, "detail", detail)
if paused ~= "" then call("HSET", JOB .. id, "paused", paused) end
if job.cancelling then return "cancel" end
if phase ~= (job.phase or "") then
  for _, cell in ipairs(cells_of(job)) do
    if cell.live then
      event(cell.build, {"type", "phase", "identifier", cell.identifier, "state", "running", "job", id,
                         "attempt", job.number, "worker", job.worker, "phase", phase})
    end
  end
end
return "ok"
