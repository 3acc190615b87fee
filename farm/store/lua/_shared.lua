-- Shared by all scripts. `link.py` puts what a script uses in front of it, after the constants LEASE, KEEP, RETRY
-- (milliseconds), EVENTS (entries that a build's stream keeps), HISTORY (durations kept of one sort), ATTEMPTS (charged
-- attempts by failure kind) and BLAMES_NODE (kinds that the node may have caused).
-- Key patterns: docs/job-store.md. All times are the server's, in milliseconds.

local call = redis.call
local TIME = call("TIME")
local NOW = TIME[1] * 1000 + math.floor(TIME[2] / 1000)

-- How names of keys begin.
local FARM = "{farm}:"
local BUILD, JOB, NODE = FARM .. "build:", FARM .. "job:", FARM .. "node:"
local POOL, WORKER = FARM .. "pool:", FARM .. "worker:"

local function wake(pool) call("ZADD", FARM .. "wake:pools", NOW, pool) end

local function wake_build(build) call("ZADD", FARM .. "wake:builds", NOW, build) end

-- One event in a build's stream; `fields` is a flat list of names and values.
local function event(build, fields)
  call("XADD", BUILD .. build .. ":events", "MAXLEN", "~", EVENTS, "*", unpack(fields))
end

-- Builds and their cells.

-- End a build if all its lots are there and its last cell has ended.
local function close(build)
  if call("EXISTS", BUILD .. build .. ":live") == 1 then return end
  local record = BUILD .. build
  local found = call("HMGET", record, "state", "cells", "accepted")
  if found[1] ~= "open" or tonumber(found[3]) < tonumber(found[2]) then return end
  call("HSET", record, "state", "ended", "ended_at", NOW)
  call("SADD", FARM .. "unreported", build)
  call("SREM", FARM .. "stopping", build)
  event(build, {"type", "build", "state", "ended"})
  wake_build(build)
end

-- A cell failed: if that was expected, it is counted, else the control plane cancels the rest of a fail_fast build.
local function failed(build, identifier, kind)
  local expected = cjson.decode(call("HGET", BUILD .. build .. ":cells", identifier)).expected
  if type(expected) == "table" and expected.kind == kind and NOW < expected.before then
    call("HINCRBY", BUILD .. build, "n:expected", 1)
  elseif call("HGET", BUILD .. build, "fail_fast") == "1" then
    call("HSET", BUILD .. build, "stop", "1")
    call("SADD", FARM .. "stopping", build)
    wake_build(build)
  end
end

-- Return the record of a cell or an attempt that ended: `about` (a table) and the outcome (unchanged JSON text).
local function ending(about, outcome)
  about.at = NOW
  return cjson.encode(about):sub(1, -2) .. ',"outcome":' .. outcome .. "}"
end

local function end_cell(build, identifier, from, to, job, document, kind)
  local record = BUILD .. build
  call("SREM", BUILD .. build .. ":live", identifier)
  call("HSET", BUILD .. build .. ":states", identifier, to)
  call("HSET", BUILD .. build .. ":ends", identifier, document)
  call("HINCRBY", record, "n:" .. from, -1)
  call("HINCRBY", record, "n:" .. to, 1)
  event(build, {"type", "cell", "identifier", identifier, "state", to, "job", job.id, "attempt", job.number,
                "worker", job.worker or "", "kind", kind or ""})
  if to == "failed" then failed(build, identifier, kind) end
  close(build)
end

-- How many more jobs of a build may be under way, or nil if their number is not bounded.
local function room_of(build)
  local most = tonumber(call("HGET", BUILD .. build, "max_parallel"))
  return most and most > 0 and math.max(0, most - call("SCARD", BUILD .. build .. ":flying")) or nil
end

local function is_full(build) return room_of(build) == 0 end

-- A build has one running job less: if the number is bounded, its pools may hand out another one.
local function landed(build)
  if room_of(build) then
    for _, pool in ipairs(call("SMEMBERS", BUILD .. build .. ":pools")) do wake(pool) end
  end
end

-- Lanes: the order in which the waiting jobs of a pool are handed out (docs/decisions/0025 and 0027).
--
-- A lane holds the jobs of one build at one level, by rank. A level is a priority and whether its jobs were started
-- before ("5:again") or not ("5:new"). At a level builds take turns: builds without a turn so far wait in the queue
-- `firsts`, the others in `turns`; at a level of jobs that were started before, all builds wait in `turns`. A build is
-- in a queue as long as its lane has jobs.

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
    call("SREM", POOL .. job.pool .. ":left", job.id)
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

-- Whether all that a job does is to measure a program that is there (`farm.jobs.state.job_key`).
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

-- Workers and their nodes.

local REMEMBERED = 3600000

-- A worker was heard. For an hour after it was last, it is known which node is silent.
local function note_heard(worker, node)
  local last = WORKER .. worker .. ":last"
  call("HSET", last, "node", node, "seen_at", NOW)
  call("PEXPIRE", last, REMEMBERED)
end

-- A worker began or ended an attempt. If its registration has expired, the worker registers again.
local function note_busy(worker)
  local record = WORKER .. worker
  if call("EXISTS", record) == 1 then call("HSET", record, "busy_at", NOW) end
end

-- The jobs whose attempts a worker runs; `also_kept`: with those whose finished program is on its node's disk.
local function running_of(worker, also_kept)
  local found = {}
  for _, id in ipairs(call("SMEMBERS", WORKER .. worker .. ":running")) do
    local job = read(id)
    if job and job.where == "running" and job.worker == worker then
      if also_kept or not job.kept then found[#found + 1] = job end
    else
      call("SREM", WORKER .. worker .. ":running", id)  -- A process of an earlier release took it away.
    end
  end
  return found
end

-- A worker is live, and has these lock files: workers of one kernel that have others cannot be asked to pause.
local function note_locks(worker, locks, ttl)
  local kernel = locks:match("^%S+")
  if not kernel then return end
  call("HSET", WORKER .. "locks:" .. kernel, worker, locks)
  call("PEXPIRE", WORKER .. "locks:" .. kernel, ttl)
end

-- Why a worker on a node takes no jobs for now, or "".
local function rests(worker, node)
  local reason = call("HGET", WORKER .. worker, "resting") or ""
  return reason ~= "" and reason or call("HGET", NODE .. node, "fenced") or ""
end

-- The slots of those workers of a pool that take jobs, and their nodes; a draining worker takes none.
local function live_slots(pool)
  local slots, nodes = 0, {}
  for _, worker in ipairs(call("ZRANGEBYSCORE", POOL .. pool .. ":workers", NOW, "+inf")) do
    local found = call("HMGET", WORKER .. worker, "slots", "node", "draining")
    if found[1] and found[3] ~= "1" and rests(worker, found[2]) == "" then
      slots = slots + tonumber(found[1])
      nodes[found[2]] = true
    end
  end
  return slots, nodes
end

-- Workers of a fenced node get no more jobs, until its health probe has passed or an operator lets it back.
local function fence(node, reason)
  local record = NODE .. node
  local is_new = call("HSETNX", record, "fenced_at", NOW) == 1
  call("PEXPIRE", record, KEEP)  -- A node whose probes fail for longer stays fenced.
  if not is_new then return end
  call("HSET", record, "fenced", reason)
  call("HDEL", record, "row", "let_back")
  call("DEL", NODE .. node .. ":passed")  -- An earlier fence may have expired before what passed under it.
end

local function unfence(node)
  local record = NODE .. node
  call("HDEL", record, "fenced", "fenced_at", "row")
  call("HSET", record, "let_back", NOW)
  call("PEXPIRE", record, KEEP)
  call("DEL", NODE .. node .. ":passed", NODE .. node .. ":blamed")
  for _, worker in ipairs(call("ZRANGEBYSCORE", FARM .. "workers", NOW, "+inf")) do
    local found = call("HMGET", WORKER .. worker, "node", "pools")
    if found[1] == node then
      for _, pool in ipairs(cjson.decode(found[2])) do wake(pool) end
    end
  end
end

-- A job failed in a way that may be its node's doing: how often in a row, and when last in this way.
local function note_failure(job, kind)
  if not BLAMES_NODE[kind] then return end
  local record = NODE .. job.node
  call("HINCRBY", record, "row", 1)
  call("HSET", record, "failed:" .. kind, NOW)
  call("PEXPIRE", record, KEEP)
end

-- How attempts end, and the consequences.

local EXCLUDED = 60000  -- how long a node that failed a job is asked last
local LOSSES = 3  -- so many workers that were lost with a job quarantine it; one less, and no worker has two such jobs

local function end_attempt(job, how, outcome)
  job.spent = call("HINCRBY", JOB .. job.id, "spent", NOW - job.started_at)
  call("HSET", JOB .. job.id .. ":attempts", job.number .. ":end", ending({["end"] = how}, outcome))
end

-- Start the next attempt: queue the job again; for a while, `node` gets it only if no other node does.
local function requeue(job, cells, delay, node, kind)
  local from = job.state
  local excluded = cjson.decode(job.excluded or "{}")
  if node then excluded[node] = NOW + delay + EXCLUDED end
  job.state, job.queued_at = "queued", NOW
  job.number = string.format("%d", job.number + 1)
  call("HSET", JOB .. job.id, "state", "queued", "number", job.number, "queued_at", NOW,
       "charged", job.charged, "losses", job.losses, "excluded", cjson.encode(excluded))
  call("HDEL", JOB .. job.id, "token", "nonce", "worker", "node", "started_at", "phase", "progress", "detail",
       "paused", "refused", "kept")
  put_back(job, cells, delay)
  move_cells(cells, job, from, "queued", kind)
end

-- A charged attempt ended with `kind`: try again, or end the job for good.
-- A lease has already cost its time, so the first loss adds no delay.
local function charge(job, cells, kind, outcome)
  note_failure(job, kind)
  job.charged = job.charged + 1
  local delays = job.charged - 1
  if kind == "worker_lost" then
    job.losses = job.losses + 1
    delays = delays - 1
  end
  if job.cancelling or not any_live(cells) then
    end_job(job, cells, "cancelled", outcome)
  elseif job.charged >= (ATTEMPTS[kind] or 1) or job.losses >= LOSSES then
    if job.losses >= LOSSES then
      call("HSET", JOB .. job.id, "quarantined", "1")
      call("SET", FARM .. "quarantined:" .. job.namespace .. ":" .. job.job_key, job.id, "PX", KEEP)
      local lost = job.charged < LOSSES and "it was in quarantine before, and another worker was lost with it"
        or "three workers were lost with this job"
      local document = cjson.decode(outcome)
      document.message = document.message .. "; " .. lost .. ", so it is in quarantine: `farm reproduce " .. job.id
        .. "` writes what it was"
      outcome = cjson.encode(document)
    end
    call("HSET", JOB .. job.id, "charged", job.charged)
    end_job(job, cells, "failed", outcome, kind)
  else
    local delay = delays < 0 and 0 or RETRY * 2 ^ delays
    requeue(job, cells, delay, job.node, kind)
  end
end

-- Take a running attempt away from a worker that will not end it; it is charged.
local function lose(job, why)
  local message = "worker " .. job.worker .. " on node " .. job.node .. " " .. why
  local outcome = cjson.encode({["end"] = "lost", kind = "worker_lost", message = message})
  end_attempt(job, "lost", outcome)
  charge(job, cells_of(job), "worker_lost", outcome)
end

-- Take a running attempt away from a worker that cannot end it, uncharged.
local function give_back(job, message)
  local cells, outcome = cells_of(job), cjson.encode({["end"] = "released", message = message})
  end_attempt(job, "released", outcome)
  if job.cancelling then end_job(job, cells, "cancelled", outcome) else requeue(job, cells, 0) end
end
