-- Hand out no more jobs of a build, or hand them out again. Running jobs go on; jobs in the
-- broker are put back when a worker claims them.
-- keys: build:<build> with :pools :events, wake:pools
-- arguments: build, paused
--   paused: 1 or 0
-- answer: 1; 0 if the build has ended; -1 if there is none
local found = call("HMGET", BUILD .. build, "state", "paused")
if not found[1] then return -1 end
if found[1] ~= "open" then return 0 end
if (found[2] or "0") ~= paused then
  call("HSET", BUILD .. build, "paused", paused)
  event(build, {"type", "build", "state", "open", "paused", paused})
  for _, pool in ipairs(call("SMEMBERS", BUILD .. build .. ":pools")) do wake(pool) end
end
return 1
