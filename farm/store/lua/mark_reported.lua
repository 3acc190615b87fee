-- A build's report is written: all its keys expire after `KEEP`.
-- keys: build:<build> with :cells :states :jobs :ends :live :flying :pools :events, unreported, incomplete
-- arguments: build, verdict
--   verdict: JSON
-- answer: none; a build that has live cells or is gone stays as it is
local record = BUILD .. build
local state = call("HGET", record, "state")
if not state or call("EXISTS", record .. ":live") == 1 then return end
if state ~= "reported" then
  call("HSET", record, "state", "reported", "verdict", verdict)
  event(build, {"type", "build", "state", "reported"})
end
call("SREM", FARM .. "unreported", build)
call("ZREM", FARM .. "incomplete", build)
for _, part in ipairs({"", ":cells", ":states", ":jobs", ":ends", ":live", ":flying", ":pools", ":events"}) do
  call("PEXPIRE", record .. part, KEEP)
end
