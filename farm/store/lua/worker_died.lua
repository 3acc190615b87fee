-- The process of a worker died, and with it its attempts: they are lost now, not when their leases expire.
-- keys: leases, job:<job> with :cells :attempts :log, active:…, pool:…, build:…, node:<node>, stopping, wake:…
-- arguments: worker, why
--   why: how it died; continues a sentence that begins with the worker
-- answer: ids of the jobs whose attempts were lost
local lost = {}
for _, job in ipairs(running_of(worker)) do
  lose(job, why)
  lost[#lost + 1] = job.id
end
return lost
