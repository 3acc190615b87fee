-- Report contradictions about a build: its cells, their counts, and its place among waiting builds. Changes nothing.
-- keys: build:<build> with :cells :states :jobs :ends :live, unreported
-- arguments: build
-- answer: list of sentences
local record = BUILD .. build
local found = call("HMGET", record, "state", "cells", "accepted", "packed")
local problems = {}
local function wrong(...) problems[#problems + 1] = string.format(...) end
if not found[1] or found[4] then return problems end

local expected, accepted = tonumber(found[2]), tonumber(found[3])
if call("HLEN", record .. ":cells") ~= accepted then
  wrong("accepted %d cells, but holds %d", accepted, call("HLEN", record .. ":cells"))
end
local counts, open = {queued = 0, running = 0, succeeded = 0, failed = 0, cancelled = 0}, 0
local states = call("HGETALL", record .. ":states")
for i = 1, #states, 2 do
  local identifier, state = states[i], states[i + 1]
  counts[state] = (counts[state] or 0) + 1
  local live = call("SISMEMBER", record .. ":live", identifier) == 1
  local job = call("HGET", record .. ":jobs", identifier)
  local ended = call("HEXISTS", record .. ":ends", identifier) == 1
  if state == "queued" or state == "running" then
    open = open + 1
    if not live then wrong("%s is %s, but nobody waits for it", identifier, state) end
    if ended then wrong("%s is %s, but has ended", identifier, state) end
    local there = job and call("HGET", JOB .. job, "state")
    if there ~= state then wrong("%s is %s, but its job is %s", identifier, state, there or "gone") end
  else
    if live then wrong("%s is %s, but is waited for", identifier, state) end
    if job and not ended then wrong("%s is %s, but not how it ended", identifier, state) end
  end
end
for state, count in pairs(counts) do
  local kept = tonumber(call("HGET", record, "n:" .. state) or 0)
  if kept ~= count then wrong("counts %d cells as %s, but %d are", kept, state, count) end
end
if open ~= call("SCARD", record .. ":live") then wrong("waits for cells that it does not have") end
if found[1] == "open" and accepted >= expected and open == 0 then wrong("has no live cell, but did not end") end
if found[1] ~= "open" and open > 0 then wrong("is %s, but has live cells", found[1]) end
if found[1] == "ended" and call("SISMEMBER", FARM .. "unreported", build) == 0 then
  wrong("ended, but nobody will write its report")
end
return problems
