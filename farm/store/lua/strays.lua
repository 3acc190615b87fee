-- Return the jobs of a pool that were handed out long ago and are not claimed.
-- keys: pool:<pool>:handed, job:<job>
-- arguments: pool, age
--   age: milliseconds
-- answer: flat list of job, attempt
local found = {}
for _, job in ipairs(call("ZRANGEBYSCORE", POOL .. pool .. ":handed", "-inf", NOW - age)) do
  found[#found + 1] = job
  found[#found + 1] = call("HGET", JOB .. job, "number") or "0"
end
return found
