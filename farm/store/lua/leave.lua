-- A worker is gone for good. Release the attempts that it neither ended nor released; the worker was stopped, so none
-- is charged.
-- keys: worker:<worker> with :last, workers, pool:…, leases, delayed, job:<job> with :cells :attempts :log, active:…,
--   build:…, wake:…
-- arguments: worker
-- answer: ids of the jobs that were released
local back = {}
for _, job in ipairs(running_of(worker)) do
  give_back(job, "worker " .. worker .. " on node " .. job.node .. " was stopped before the attempt had ended")
  back[#back + 1] = job.id
end
local pools = call("HGET", WORKER .. worker, "pools")
call("ZREM", FARM .. "workers", worker)
for _, pool in ipairs(cjson.decode(pools or "[]")) do call("ZREM", POOL .. pool .. ":workers", worker) end
call("DEL", WORKER .. worker, WORKER .. worker .. ":last")
return back
