-- End those of a build's cells that wait; cells whose jobs run go on. The build may end by this.
-- keys: build:<build> with :live :states :jobs :ends :events, job:<job> with :cells :attempts :log, active:…, pool:…,
--   delayed, unreported, wake:…
-- arguments: build, identifiers, reason
--   identifiers: JSON list
-- answer: the number of cells that were ended
local outcome = cjson.encode({["end"] = "cancelled", message = reason})
local count = 0
for _, identifier in ipairs(cjson.decode(identifiers)) do
  if call("SISMEMBER", BUILD .. build .. ":live", identifier) == 1 then
    local job = read(call("HGET", BUILD .. build .. ":jobs", identifier))
    if job.state == "queued" then
      cancel_cell(build, identifier, job, outcome)
      count = count + 1
    end
  end
end
return count
