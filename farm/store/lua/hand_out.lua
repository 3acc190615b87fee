-- Choose the next jobs of a pool for the broker: by priority, then in turn between builds, then by rank (long first).
-- Skips builds that are at their `max_parallel`, paused or being stopped; a paused pool hands out nothing. The stock
-- in the broker is refilled when half of it has been claimed, so that several jobs are sent at once, a hundred at most.
-- Jobs that were started before have the same room again, and go first if nothing more urgent is in the broker.
-- keys: pool:<pool>:levels :firsts:<level> :turns:<level> :row :ready:<level>:<build> :waiting :handed :low :workers,
--   worker:<worker>, node:<node>, job:<job> with :cells, build:<build>, build:<build>:flying, paused
-- arguments: pool, per_slot
--   per_slot: most unclaimed jobs in the broker for each live slot
-- answer: flat list of job, attempt; the pool is woken again if it may get more

local FIRSTS = 3     -- so many builds in a row have their first turn while others wait
local AT_ONCE = 100  -- so many jobs in one call: a thousand kept every other caller waiting for a tenth of a second

if call("SISMEMBER", FARM .. "paused", pool) == 1 then return {} end
local most = live_slots(pool) * tonumber(per_slot)
local low = math.floor(most / 2)
call("SET", POOL .. pool .. ":low", low)
local room, spare, urgent = most, most, -math.huge
for _, id in ipairs(call("ZRANGE", POOL .. pool .. ":handed", 0, -1)) do
  local found = call("HMGET", JOB .. id, "number", "priority")
  if tonumber(found[1] or 1) > 1 then spare = spare - 1 else room = room - 1 end
  urgent = math.max(urgent, tonumber(found[2] or urgent))
end
if most - room > low then room = 0 end

local function held(build)
  local found = call("HMGET", BUILD .. build, "stop", "paused")
  return found[1] == "1" or found[2] == "1" or is_full(build)
end

local passed = {}  -- how far builds were passed over in each queue

-- The build whose turn it is at a level, or nil. Those that are held are passed over.
local function next_build(level)
  local queues = {"firsts", "turns"}
  if tonumber(call("HGET", POOL .. pool .. ":row", level) or 0) >= FIRSTS then queues = {"turns", "firsts"} end
  for _, queue in ipairs(queues) do
    local builds = POOL .. pool .. ":" .. queue .. ":" .. level
    while true do
      local build, score = unpack(call("ZRANGEBYSCORE", builds, passed[builds] or "-inf", "+inf", "WITHSCORES",
                                       "LIMIT", 0, 1))
      if build and not held(build) then return build end
      if not build then break end
      passed[builds] = "(" .. score
    end
  end
  return nil
end

local chosen = {}
for _, level in ipairs(levels_of(pool)) do
  local priority, again = tonumber(level:match("^[^:]+")), is_again(level)
  while not again or (spare > 0 and priority >= urgent) do
    local build = next_build(level)
    if not build then break end
    if not again and room <= 0 then return chosen end
    if #chosen == 2 * AT_ONCE then
      wake(pool)
      return chosen
    end
    local id = take_turn(pool, level, build)
    local job = id and read(id)
    if job and job.where == "waiting" then
      local cells = cells_of(job)
      if #cells > 1 then withdraw(job, cells) end
      place(job, "handed", cells)
      call("HSET", JOB .. id, "where", "handed")
      chosen[#chosen + 1] = id
      chosen[#chosen + 1] = job.number
      if again then spare = spare - 1 else room = room - 1 end
      urgent = math.max(urgent, priority)
    end
  end
end
return chosen
