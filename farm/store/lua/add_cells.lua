-- Take one lot of a build's cells: born ended, joined to the unfinished job of their job key, or with a new job.
-- Cells that exist are skipped, so a lot may be sent again.
-- keys: build:<build> with :cells :states :jobs :live :flying :pools :events, active:<namespace>:<job key>,
--   quarantined:<namespace>:<job key>,
--   job:<job> with :cells, pool:<pool>:waiting :levels :firsts:<level> :turns:<level> :row :ready:<level>:<build>,
--   incomplete, stopping, unreported, wake:pools, wake:builds
-- arguments: build, cells
--   cells: JSON list of [identifier, key, namespace, pool, priority, seconds, bytes, expected, born, document, order,
--   job, job key] (all text): limits in seconds and bytes, expected seconds, born "" or "succeeded", the cell as
--   JSON, its work order as JSON, the id of its job if it needs a new one, and the key that it shares with cells that
--   may share its job
-- answer: the number of cells that the build got so far; -1 if there is no such build
local record = BUILD .. build
local found = call("HMGET", record, "state", "accepted", "cells", "stop")
if not found[1] then return -1 end
local accepted, counts, added = tonumber(found[2]), {}, 0
local stopped = found[4] == "1"
if found[1] == "reported" then return accepted end  -- its cells may be packed

-- Return the unfinished job that a cell with this job key joins, or nil. A job that is being cancelled takes no new
-- cell.
local function joinable(namespace, job_key)
  local id = call("GET", FARM .. "active:" .. namespace .. ":" .. job_key)
  local job = id and read(id)
  if job and not job.cancelling and (job.state == "queued" or job.state == "running") then return job end
  return nil
end

for _, cell in ipairs(cjson.decode(cells)) do
  local identifier, cache_key, namespace, pool, priority = cell[1], cell[2], cell[3], cell[4], cell[5]
  local state, document, job_id, job_key = cell[9], cell[10], cell[12], cell[13]
  if state == "" and stopped then state = "cancelled" end
  if call("HSETNX", BUILD .. build .. ":cells", identifier, document) == 1 then
    added = added + 1
    if state == "" then
      call("SADD", BUILD .. build .. ":live", identifier)
      call("SADD", BUILD .. build .. ":pools", pool)
      local job = joinable(namespace, job_key)
      local limits = cell[6] .. " " .. cell[7] .. " " .. priority
      if job then
        job_id, state = job.id, job.state
        local known = cells_of(job)
        call("HSET", JOB .. job_id .. ":cells", build .. "|" .. identifier, limits)
        local mine = {build = build, identifier = identifier, priority = tonumber(priority), live = true}
        known[#known + 1] = mine
        set_priority(job, known)
        if job.where == "waiting" then
          if not call("ZSCORE", FARM .. "delayed", job_id) then offer(job, {mine}) end
        else
          call("SADD", BUILD .. build .. ":flying", job_id)
        end
      else
        state = "queued"
        -- Three workers were lost with it before: one more is enough, and it meets no other that may be like it.
        local losses = call("EXISTS", FARM .. "quarantined:" .. namespace .. ":" .. job_key) == 1 and LOSSES - 1 or 0
        job = {id = job_id, pool = pool, priority = priority, number = 1,
               rank = -math.floor(tonumber(cell[8])) * 1e6 + accepted + added}
        call("HSET", JOB .. job_id, "state", state, "where", "waiting", "namespace", namespace, "key", cache_key,
             "job_key", job_key, "pool", pool, "priority", priority, "rank", job.rank, "number", 1, "charged", 0,
             "losses", losses, "created_at", NOW, "queued_at", NOW, "excluded", "{}", "expected", cell[8],
             "build", build, "order", cell[11])
        call("HSET", JOB .. job_id .. ":cells", build .. "|" .. identifier, limits)
        call("SET", FARM .. "active:" .. namespace .. ":" .. job_key, job_id)
        call("ZADD", POOL .. pool .. ":waiting", NOW, job_id)
        offer(job, {{build = build, live = true}})
      end
      call("HSET", BUILD .. build .. ":jobs", identifier, job_id)
    end
    call("HSET", BUILD .. build .. ":states", identifier, state)
    counts[state] = (counts[state] or 0) + 1
  end
end

if added > 0 then
  accepted = call("HINCRBY", record, "accepted", added)
  for state, count in pairs(counts) do call("HINCRBY", record, "n:" .. state, count) end
  event(build, {"type", "accepted", "cells", added, "accepted", accepted})
  if accepted >= tonumber(found[3]) then call("ZREM", FARM .. "incomplete", build) end
  close(build)
end
return accepted
