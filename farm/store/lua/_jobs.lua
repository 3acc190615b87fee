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

-- Jobs: their records, the cells that joined them, and the list of their pool that they are in.

local FIELDS = {"state", "where", "namespace", "key", "job_key", "pool", "priority", "rank", "number", "charged",
                "losses", "token", "nonce", "build", "worker", "node", "started_at", "queued_at", "cancelling",
                "excluded", "time", "memory", "phase", "spent", "kept", "paused"}

-- Return a job's fields without its order, or nil if there is no such job.
local function read(job)
  local values = call("HMGET", JOB .. job, unpack(FIELDS))
  if not values[1] then return nil end
  local found = {id = job}
  for i, name in ipairs(FIELDS) do found[name] = values[i] end
  found.charged, found.losses = tonumber(found.charged), tonumber(found.losses)
  return found
end

-- Every cell that joined a job: {build, identifier, time, memory, priority, live}.
local function cells_of(job)
  local flat, found = call("HGETALL", JOB .. job.id .. ":cells"), {}
  for i = 1, #flat, 2 do
    local build, identifier = flat[i]:match("^([^|]+)|(.*)$")
    local time, memory, priority = flat[i + 1]:match("^(%S+) (%S+) (%S+)$")
    local live = call("SISMEMBER", BUILD .. build .. ":live", identifier) == 1
    found[#found + 1] = {build = build, identifier = identifier, time = tonumber(time), memory = tonumber(memory),
                         priority = tonumber(priority), live = live}
  end
  return found
end

local function any_live(cells)
  for _, cell in ipairs(cells) do if cell.live then return true end end
  return false
end

-- What is paused so that a job rests: its pool, or every build that wants it (the first of them); else nil.
local function paused_by(job, cells)
  if call("SISMEMBER", FARM .. "paused", job.pool) == 1 then return job.pool end
  local first = nil
  for _, cell in ipairs(cells) do
    if cell.live then
      if call("HGET", BUILD .. cell.build, "paused") ~= "1" then return nil end
      first = first or cell.build
    end
  end
  return first
end

-- The larger of two limits: 0 means none, so it is the largest.
local function larger(a, b)
  if a == 0 or b == 0 then return 0 end
  return math.max(a, b)
end

-- The live cells of a job follow it from one state to another.
local function move_cells(cells, job, from, to, kind)
  for _, cell in ipairs(cells) do
    if cell.live then
      local record = BUILD .. cell.build
      call("HSET", BUILD .. cell.build .. ":states", cell.identifier, to)
      call("HINCRBY", record, "n:" .. from, -1)
      call("HINCRBY", record, "n:" .. to, 1)
      event(cell.build, {"type", "cell", "identifier", cell.identifier, "state", to, "job", job.id,
                         "attempt", job.number, "worker", to == "running" and job.worker or "", "kind", kind or ""})
    end
  end
end

-- Move a job in its pool: "waiting" (to be handed out), "handed" (to the broker), "running", "" (ended).
-- Callers write `where` with the job's other fields.
local function place(job, where, cells)
  if job.where ~= "" then call("ZREM", POOL .. job.pool .. ":" .. job.where, job.id) end
  if where ~= "" then
    call("ZADD", POOL .. job.pool .. ":" .. where, where == "waiting" and job.queued_at or NOW, job.id)
  end
  if job.where == "running" then
    call("ZREM", FARM .. "leases", job.id)
    call("ZREM", FARM .. "kept", job.id)
    call("SREM", WORKER .. job.worker .. ":running", job.id)
  end
  if where == "running" then
    call("ZADD", FARM .. "leases", NOW + LEASE, job.id)
    call("SADD", WORKER .. job.worker .. ":running", job.id)
  end
  for _, cell in ipairs(cells) do
    if where == "handed" and cell.live then
      call("SADD", BUILD .. cell.build .. ":flying", job.id)
    elseif (where == "waiting" or where == "") and call("SREM", BUILD .. cell.build .. ":flying", job.id) == 1 then
      landed(cell.build)
    end
  end
end

-- Put a job back to waiting, until `delay` has passed if there is one.
local function put_back(job, cells, delay)
  place(job, "waiting", cells)
  call("HSET", JOB .. job.id, "where", "waiting")
  if delay > 0 then
    call("ZADD", FARM .. "delayed", NOW + delay, job.id)
  else
    offer(job, cells)
  end
end

-- A job's priority is the largest among its live cells; it has some.
local function set_priority(job, cells)
  local priority = nil
  for _, cell in ipairs(cells) do
    if cell.live and (not priority or cell.priority > priority) then priority = cell.priority end
  end
  if priority == tonumber(job.priority) then return end
  local offered = job.where == "waiting" and not call("ZSCORE", FARM .. "delayed", job.id)
  if offered then withdraw(job, cells) end
  job.priority = string.format("%d", priority)
  call("HSET", JOB .. job.id, "priority", job.priority)
  if offered then offer(job, cells) end
end

-- Whether all that a job does is to measure a program that is there (`farm.jobs.order.job_key`).
local function is_measurement(job)
  return job.job_key:find(":against:", 1, true) ~= nil
end

-- What is kept of a job's last attempt with a cell that ends.
local function about(job)
  return {job = job.id, attempt = tonumber(job.number), worker = job.worker or nil, spent = tonumber(job.spent) or nil,
          started_at = tonumber(job.started_at) or nil, paused = tonumber(job.paused) or nil}
end

-- End a job and its live cells, and let all that belongs to it expire.
local function end_job(job, cells, to, outcome, kind)
  local from = job.state
  if to == "failed" and is_measurement(job) then
    local failure = cjson.decode(outcome)
    if not failure.made_again then
      to, kind = "succeeded", nil
      outcome = cjson.encode({["end"] = "succeeded", hit = true, unmeasured = failure.message})
    end
  end
  if job.where == "waiting" then
    withdraw(job, cells)
    call("ZREM", FARM .. "delayed", job.id)
  end
  place(job, "", cells)
  call("HSET", JOB .. job.id, "state", to, "where", "", "ended_at", NOW, "outcome", outcome)
  local active = FARM .. "active:" .. job.namespace .. ":" .. job.job_key
  if call("GET", active) == job.id then call("DEL", active) end
  local document = ending(about(job), outcome)
  for _, cell in ipairs(cells) do
    if cell.live then end_cell(cell.build, cell.identifier, from, to, job, document, kind) end
  end
  for _, part in ipairs({"", ":cells", ":attempts", ":log"}) do
    call("PEXPIRE", JOB .. job.id .. part, KEEP)
  end
end

-- End one live cell of a build, and its job if nobody else waits for it: a queued job at once, a running one at its
-- worker's next renewal.
local function cancel_cell(build, identifier, job, outcome)
  local cells = cells_of(job)
  end_cell(build, identifier, job.state, "cancelled", job, ending(about(job), outcome))
  for _, cell in ipairs(cells) do
    if cell.build == build and cell.identifier == identifier then cell.live = false end
  end
  if any_live(cells) then
    set_priority(job, cells)
  elseif job.state == "running" then
    call("HSET", JOB .. job.id, "cancelling", "1")
  else
    end_job(job, cells, "cancelled", outcome)
  end
end
