-- End up to `limit` live cells of a build, and cancel jobs without live cells: a queued job at once, a running one at
-- its worker's next renewal.
-- keys: build:<build> with :live :states :jobs :ends :events, job:<job> with :cells :attempts :log, active:…, pool:…,
--   leases, delayed, stopping, unreported, wake:…
-- arguments: build, limit, reason
-- answer: the number of cells that were ended (call again until 0); -1 if there is no such build
local state = call("HGET", BUILD .. build, "state")
if not state then return -1 end
if state ~= "open" then return 0 end
call("HSET", BUILD .. build, "stop", "1")
local outcome = cjson.encode({["end"] = "cancelled", message = reason})
local identifiers = call("SRANDMEMBER", BUILD .. build .. ":live", limit)
for _, identifier in ipairs(identifiers) do
  cancel_cell(build, identifier, read(call("HGET", BUILD .. build .. ":jobs", identifier)), outcome)
end
if #identifiers == 0 then call("SREM", FARM .. "stopping", build) end
return #identifiers
