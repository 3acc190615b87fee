-- Record that jobs were sent to the broker again.
-- keys: pool:<pool>:handed
-- arguments: pool, jobs
--   jobs: JSON list of job ids
-- answer: the number of them that are still unclaimed
local count = 0
for _, job in ipairs(cjson.decode(jobs)) do
  if call("ZSCORE", POOL .. pool .. ":handed", job) then
    call("ZADD", POOL .. pool .. ":handed", NOW, job)
    count = count + 1
  end
end
return count
