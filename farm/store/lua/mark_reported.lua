-- A build's report is written: everything of it expires after `KEEP`.
-- keys: build:<build> with :cells :states :jobs :ends :live :flying :pools :events, unreported
-- arguments: build, verdict
--   verdict: JSON
-- answer: 1; 0 when the build has not ended or is gone
local record = key("build", build)
local state = call("HGET", record, "state")
if state ~= "ended" and state ~= "reported" then return 0 end
if state == "ended" then
  call("HSET", record, "state", "reported", "verdict", verdict)
  event(build, {"type", "build", "state", "reported"})
end
call("SREM", key("unreported"), build)
for _, part in ipairs({"", ":cells", ":states", ":jobs", ":ends", ":live", ":flying", ":pools", ":events"}) do
  call("PEXPIRE", record .. part, KEEP)
end
return 1
