-- Put the compressed records of ended jobs in the place of the records.
-- keys: job:<job> with :cells :attempts :log :packed, build:<build>:packed
-- arguments: build, jobs, logged, packed
--   jobs: JSON list; logged: JSON list of those whose logs are in object storage; packed: the records of all
-- answer: none; nothing changes if one of the jobs is gone or has not ended
local ids = cjson.decode(jobs)
for _, id in ipairs(ids) do
  if call("HEXISTS", JOB .. id, "ended_at") == 0 then return end
end
call("HSET", BUILD .. build .. ":packed", ids[1], packed)
call("PEXPIRE", BUILD .. build .. ":packed", KEEP)
for _, id in ipairs(ids) do
  call("SET", JOB .. id .. ":packed", build .. " " .. ids[1], "PX", KEEP)
  call("DEL", JOB .. id, JOB .. id .. ":cells", JOB .. id .. ":attempts")
end
for _, id in ipairs(cjson.decode(logged)) do call("DEL", JOB .. id .. ":log") end
