-- Count the slots that a pool could use now: for what runs in one, and what could be handed out if workers were there.
-- Changes nothing. A job that several builds wait for counts once for each of them, but never more than all that wait.
-- keys: paused, pool:<pool>:running :left :handed :waiting :levels :firsts:<level> :turns:<level>
--   :ready:<level>:<build>, build:<build> with :flying
-- arguments: pool
-- answer: a number
local busy = call("ZCARD", POOL .. pool .. ":running") - call("SCARD", POOL .. pool .. ":left")
  + call("ZCARD", POOL .. pool .. ":handed")
if call("SISMEMBER", FARM .. "paused", pool) == 1 then return busy end
local ready = {}
for _, level in ipairs(levels_of(pool)) do
  for _, queue in ipairs({"firsts", "turns"}) do
    for _, build in ipairs(call("ZRANGE", POOL .. pool .. ":" .. queue .. ":" .. level, 0, -1)) do
      ready[build] = (ready[build] or 0) + call("ZCARD", lane_of(pool, level, build))
    end
  end
end
local count = 0
for build, jobs in pairs(ready) do
  local stop, paused = unpack(call("HMGET", BUILD .. build, "stop", "paused"))
  if stop ~= "1" and paused ~= "1" then count = count + math.min(jobs, room_of(build) or jobs) end
end
return busy + math.min(count, call("ZCARD", POOL .. pool .. ":waiting"))
