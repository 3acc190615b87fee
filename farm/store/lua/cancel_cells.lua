-- End up to `limit` live cells of a build, and cancel jobs without live cells: a queued job at once, a running one at
-- its worker's next renewal.
-- keys: build:<build> with :live :states :jobs :ends :events, job:<job> with :cells :attempts :log, active:…, pool:…,
--   leases, delayed, stopping, unreported, wake:…
-- arguments: build, limit, reason
-- answer: the number of cells that were ended (call again until 0); -1 if there is no such build
local state = call("HGET", key("build", build), "state")
if not state then return -1 end
if state ~= "open" then return 0 end
call("HSET", key("build", build), "stop", "1")
local outcome = cjson.encode({["end"] = "cancelled", message = reason})
local identifiers = call("SRANDMEMBER", key("build", build, "live"), limit)
for _, identifier in ipairs(identifiers) do
  local job = read(call("HGET", key("build", build, "jobs"), identifier))
  local cells = cells_of(job)
  local about = {job = job.id, attempt = tonumber(job.number), worker = job.worker or nil,
                 started_at = tonumber(job.started_at) or nil, spent = tonumber(job.spent) or nil}
  end_cell(build, identifier, job.state, "cancelled", job, ending(about, outcome))
  for _, cell in ipairs(cells) do
    if cell.build == build and cell.identifier == identifier then cell.live = false end
  end
  if any_live(cells) then
    set_priority(job, cells)
  elseif job.state == "running" then
    call("HSET", key("job", job.id), "cancelling", "1")
  else
    end_job(job, cells, "cancelled", outcome)
  end
end
if #identifiers == 0 then call("SREM", key("stopping"), build) end
return #identifiers
