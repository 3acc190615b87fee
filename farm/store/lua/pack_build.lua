-- Drop the cells of a reported build: who follows it is led to its report by the end of its events.
-- keys: build:<build> with :cells :states :jobs :ends :pools :events
-- arguments: build
-- answer: none; a build that is not reported stays as it is
local record = BUILD .. build
if call("HGET", record, "state") ~= "reported" then return end
call("HSET", record, "packed", "1")
call("DEL", record .. ":cells", record .. ":states", record .. ":jobs", record .. ":ends", record .. ":pools")
call("XADD", record .. ":events", "MAXLEN", 1, "*", "type", "build", "state", "reported")
