-- Offer the jobs whose delay has passed.
-- keys: delayed, job:<job> with :cells, pool:<pool>:levels :firsts:<level> :turns:<level> :ready:<level>:<build>,
--   wake:pools
-- arguments: limit
-- answer: the number of jobs that were offered
local due = call("ZRANGEBYSCORE", FARM .. "delayed", "-inf", NOW, "LIMIT", 0, limit)
for _, id in ipairs(due) do
  call("ZREM", FARM .. "delayed", id)
  local job = read(id)
  if job and job.where == "waiting" then offer(job, cells_of(job)) end
end
return #due
