-- Choose the next jobs of a pool for the broker: by priority, then in turn between builds, then by rank (long first).
-- Builds at their `max_parallel`, and builds that are being stopped or are paused, are passed over; a paused pool hands
-- out nothing. The stock in the broker is filled up when half of it has been claimed, so that lots stay lots. Jobs that
-- were started before have as much room of their own, and go on top: once nothing more urgent lies there.
-- keys: pool:<pool>:lanes :ready:<lane> :waiting :handed :low :turns :workers, worker:<worker>, node:<node>, turn,
--   job:<job> with :cells, build:<build>, build:<build>:flying, paused
-- arguments: pool, per_slot
--   per_slot: how many jobs may be with the broker, unclaimed, for each live slot
-- answer: flat list of job, attempt
if call("SISMEMBER", key("paused"), pool) == 1 then return {} end
local lanes = key("pool", pool, "lanes")
local most = live_slots(pool) * tonumber(per_slot)
local low = math.floor(most / 2)
call("SET", key("pool", pool, "low"), low)
local room, spare, urgent = most, most, -math.huge
for _, id in ipairs(call("ZRANGE", key("pool", pool, "handed"), 0, -1)) do
  local found = call("HMGET", key("job", id), "number", "priority")
  if tonumber(found[1] or 1) > 1 then spare = spare - 1 else room = room - 1 end
  urgent = math.max(urgent, tonumber(found[2] or urgent))
end
if most - room > low then room = 0 end
local chosen, passed = {}, 0
while true do
  local lane, score = unpack(call("ZRANGE", lanes, passed, passed, "WITHSCORES"))
  if not lane then break end
  local priority, build, again = lane:match("^([^|]+)|([^|]+)(.*)$")
  again = again ~= ""
  local bound = call("HMGET", key("build", build), "max_parallel", "stop", "paused")
  local parallel = tonumber(bound[1] or "0")
  local full = parallel > 0 and call("SCARD", key("build", build, "flying")) >= parallel
  if bound[2] == "1" or bound[3] == "1" or full then
    passed = passed + 1
  elseif again and (spare <= 0 or tonumber(priority) < urgent) then
    passed = passed + 1
  elseif not again and room <= 0 then
    break
  else
    local id = call("ZPOPMIN", key("pool", pool, "ready", lane))[1]
    if not again then serve(pool, priority, score) end
    if call("EXISTS", key("pool", pool, "ready", lane)) == 1 then
      queue_up(pool, lane, priority, again)
    else
      call("ZREM", lanes, lane)
    end
    local job = id and read(id)
    if job and job.where == "waiting" then
      local cells = cells_of(job)
      if #cells > 1 then withdraw(job, cells) end
      place(job, "handed", cells)
      call("HSET", key("job", id), "where", "handed")
      chosen[#chosen + 1] = id
      chosen[#chosen + 1] = job.number
      if again then spare = spare - 1 else room = room - 1 end
      urgent = math.max(urgent, tonumber(priority))
    end
  end
end
return chosen
