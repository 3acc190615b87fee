-- Lanes: the order in which the waiting jobs of a pool are handed out (docs/decisions/0025 and 0027).
--
-- A lane holds the jobs of one build at one level, by rank. A level is a priority and whether its jobs were started
-- before ("5:again") or not ("5:new"). At a level builds take turns: builds without a turn so far wait in the queue
-- `firsts`, the others in `turns`; at a level of jobs that were started before, all builds wait in `turns`. A build is
-- in a queue as long as its lane has jobs.

local FIRSTS = 3  -- so many builds in a row have their first turn while others wait

-- The name of a job's level, and its place among the others: a higher one is handed out first.
local function level_of(job)
  local again = tonumber(job.number) > 1
  return job.priority .. (again and ":again" or ":new"), 2 * job.priority + (again and 1 or 0)
end

-- The levels of a pool that have lanes, in the order in which they are handed out.
local function levels_of(pool) return call("ZREVRANGE", POOL .. pool .. ":levels", 0, -1) end

-- Whether the jobs of a level were started before.
local function is_again(level) return level:match(":again$") ~= nil end

local function lane_of(pool, level, build) return POOL .. pool .. ":ready:" .. level .. ":" .. build end

-- Let a build wait behind the others in a queue of its level: "firsts" or "turns".
local function queue_up(pool, level, queue, build)
  local builds = POOL .. pool .. ":" .. queue .. ":" .. level
  local last = call("ZRANGE", builds, -1, -1, "WITHSCORES")[2] or 0
  call("ZADD", builds, last + 1, build)
end

-- The lane of a build is empty: the build waits at that level no longer.
local function step_out(pool, level, build)
  local firsts, turns = POOL .. pool .. ":firsts:" .. level, POOL .. pool .. ":turns:" .. level
  call("ZREM", firsts, build)
  call("ZREM", turns, build)
  if call("EXISTS", firsts, turns) == 0 then
    call("ZREM", POOL .. pool .. ":levels", level)
    call("HDEL", POOL .. pool .. ":row", level)
  end
end

-- Offer a queued job to its pool: in its lane of each build that wants it. A lane that is new queues up.
local function offer(job, cells)
  local level, place = level_of(job)
  for _, cell in ipairs(cells) do
    if cell.live then
      local lane = lane_of(job.pool, level, cell.build)
      if call("EXISTS", lane) == 0 then
        call("ZADD", POOL .. job.pool .. ":levels", place, level)
        queue_up(job.pool, level, is_again(level) and "turns" or "firsts", cell.build)
      end
      call("ZADD", lane, job.rank, job.id)
    end
  end
  wake(job.pool)
end

local function withdraw(job, cells)
  local level = level_of(job)
  for _, cell in ipairs(cells) do
    local lane = lane_of(job.pool, level, cell.build)
    if call("ZREM", lane, job.id) == 1 and call("EXISTS", lane) == 0 then step_out(job.pool, level, cell.build) end
  end
end

-- The build whose turn it is at a level, or nil. Those for which `held` is true are passed over; `passed`, a table that
-- is empty at first, keeps how far that went in each queue.
local function next_build(pool, level, held, passed)
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

-- Give a build its turn: take the first job out of its lane. If there are more, it waits for another turn.
local function take_turn(pool, level, build)
  local lane = lane_of(pool, level, build)
  local id = call("ZPOPMIN", lane)[1]
  if call("ZREM", POOL .. pool .. ":firsts:" .. level, build) == 1 then
    call("HINCRBY", POOL .. pool .. ":row", level, 1)
  else
    call("HDEL", POOL .. pool .. ":row", level)
  end
  if call("EXISTS", lane) == 1 then
    queue_up(pool, level, "turns", build)
  else
    step_out(pool, level, build)
  end
  return id
end
