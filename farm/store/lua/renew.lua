-- A worker says that its attempt lives, and what it is doing.
-- keys: job:<job> with :cells :log, leases, build:<build>:events
-- arguments: job, token, phase, progress, detail, log
--   progress: a number, or "" where it is not known; log: the last part of the attempt's log, "" = as before
-- answer: "ok", "cancel" (nobody wants it any more: end it, then finish) or "lost" (it is somebody else's now)
local id = job
local job = read(id)
if not job or job.state ~= "running" or job.token ~= token then return "lost" end
call("ZADD", key("leases"), NOW + LEASE, id)
if log ~= "" then call("SET", key("job", id, "log"), log) end
call("HSET", key("job", id), "phase", phase, "progress", progress, "detail", detail)
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
