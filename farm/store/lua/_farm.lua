-- What all scripts share. `scripts.py` puts it in front of each, after the constants LEASE, KEEP, RETRY (milliseconds),
-- EVENTS (entries that a build's stream keeps), HISTORY (durations kept of one sort), ATTEMPTS (charged attempts by failure kind) and BLAMES_NODE (kinds that may
-- be the node's doing).
-- Key patterns: docs/job-store.md. All times are the server's, in milliseconds.

local EXCLUDED = 60000  -- how long a node that failed a job is asked last
local AGAIN = 250       -- how long a job waits after it met a node that must not have it: that is often the one with a free slot
local LONE = 1000       -- how long at most, where few wait
local CROWDED = 50      -- how long for each job that waits, where many do: then they are offered twenty times a second in all
local LOSSES = 3        -- so many workers that were lost with a job quarantine it; one less, and no worker has two such jobs
local APART = 5000      -- how long such a job waits at most until it is offered again
local FENCING = 3       -- so many different jobs that failed on a node and then succeeded elsewhere fence it
local COUNTS = 86400000 -- how long each of them counts
local TROUBLE = 600000  -- a node that failed in the same way so shortly before says nothing against another
local PASSES = 2        -- so many health probes in a row let a fenced node back
local TURN = 4          -- places from one turn to the next; on those between (3), builds may have their first

local call = redis.call
local TIME = call("TIME")
local NOW = TIME[1] * 1000 + math.floor(TIME[2] / 1000)

local function key(...)
  return "{farm}:" .. table.concat({...}, ":")
end

local FIELDS = {"state", "where", "namespace", "key", "job_key", "pool", "priority", "rank", "number", "charged", "losses", "token",
                "nonce", "build", "worker", "node", "started_at", "queued_at", "cancelling", "excluded", "time",
                "memory", "phase", "spent"}

-- A job's fields but its order, or nil where there is no such job.
local function read(job)
  local values = call("HMGET", key("job", job), unpack(FIELDS))
  if not values[1] then return nil end
  local found = {id = job}
  for i, name in ipairs(FIELDS) do found[name] = values[i] end
  found.charged, found.losses = tonumber(found.charged), tonumber(found.losses)
  return found
end

-- Every cell that joined a job: {build, identifier, time, memory, priority, live}.
local function cells_of(job)
  local flat, found = call("HGETALL", key("job", job.id, "cells")), {}
  for i = 1, #flat, 2 do
    local build, identifier = flat[i]:match("^([^|]+)|(.*)$")
    local time, memory, priority = flat[i + 1]:match("^(%S+) (%S+) (%S+)$")
    local live = call("SISMEMBER", key("build", build, "live"), identifier) == 1
    found[#found + 1] = {build = build, identifier = identifier, time = tonumber(time), memory = tonumber(memory),
                         priority = tonumber(priority), live = live}
  end
  return found
end

local function any_live(cells)
  for _, cell in ipairs(cells) do if cell.live then return true end end
  return false
end

-- The larger of two limits: 0 means none, so it is the largest.
local function larger(a, b)
  if a == 0 or b == 0 then return 0 end
  return math.max(a, b)
end

local function wake(pool) call("ZADD", key("wake", "pools"), NOW, pool) end

local function wake_build(build) call("ZADD", key("wake", "builds"), NOW, build) end

-- One event in a build's stream; `fields` is a flat list of names and values.
local function event(build, fields)
  call("XADD", key("build", build, "events"), "MAXLEN", "~", EVENTS, "*", unpack(fields))
end

-- End a build whose last cell ended and whose lots are all there.
local function close(build)
  if call("EXISTS", key("build", build, "live")) == 1 then return end
  local record = key("build", build)
  local found = call("HMGET", record, "state", "cells", "accepted")
  if found[1] ~= "open" or tonumber(found[3]) < tonumber(found[2]) then return end
  call("HSET", record, "state", "ended", "ended_at", NOW)
  call("SADD", key("unreported"), build)
  call("SREM", key("stopping"), build)
  event(build, {"type", "build", "state", "ended"})
  wake_build(build)
end

-- A cell failed: a build with fail_fast ends the others (the control plane does, in lots).
local function failed(build)
  if call("HGET", key("build", build), "fail_fast") == "1" then
    call("HSET", key("build", build), "stop", "1")
    call("SADD", key("stopping"), build)
    wake_build(build)
  end
end

-- What is kept of a cell or an attempt that ended: `about` (a table) and the outcome (JSON text, as it is).
local function ending(about, outcome)
  about.at = NOW
  return cjson.encode(about):sub(1, -2) .. ',"outcome":' .. outcome .. "}"
end

local function end_cell(build, identifier, from, to, job, document, kind)
  local record = key("build", build)
  call("SREM", key("build", build, "live"), identifier)
  call("HSET", key("build", build, "states"), identifier, to)
  call("HSET", key("build", build, "ends"), identifier, document)
  call("HINCRBY", record, "n:" .. from, -1)
  call("HINCRBY", record, "n:" .. to, 1)
  event(build, {"type", "cell", "identifier", identifier, "state", to, "job", job.id, "attempt", job.number,
                "worker", job.worker or "", "kind", kind or ""})
  if to == "failed" then failed(build) end
  close(build)
end

-- The live cells of a job follow it from one state to another.
local function move_cells(cells, job, from, to, kind)
  for _, cell in ipairs(cells) do
    if cell.live then
      local record = key("build", cell.build)
      call("HSET", key("build", cell.build, "states"), cell.identifier, to)
      call("HINCRBY", record, "n:" .. from, -1)
      call("HINCRBY", record, "n:" .. to, 1)
      event(cell.build, {"type", "cell", "identifier", cell.identifier, "state", to, "job", job.id,
                         "attempt", job.number, "worker", to == "running" and job.worker or "", "kind", kind or ""})
    end
  end
end

-- The two lanes of a job's priority in a build: for new jobs, and for those that were started before. An older release had
-- the first for both.
local function lanes_of(job, build)
  local lane = job.priority .. "|" .. build
  return {lane, lane .. "|again"}
end

-- Give a lane its place: by priority, then turn; those of jobs that were started before are the first of their priority.
-- A build that has had no turn yet comes before those that have had: on a place between two turns, where so many fit that
-- a stream of small builds leaves the others a turn after every third (docs/decisions/0027).
local function queue_up(pool, lane, priority, again, newcomer)
  local turns, field = key("pool", pool, "turns"), priority .. (newcomer and ":first" or ":later")
  local served, given = unpack(call("HMGET", turns, priority .. ":served", field))
  -- An older release drew all places from one counter: what it left comes before ours.
  local place = math.max(tonumber(served or call("GET", key("turn")) or 0), tonumber(given or 0))
  if newcomer then
    place = place + ((place + 1) % TURN == 0 and 2 or 1)
  else
    place = place - place % TURN + TURN
  end
  call("HSET", turns, field, place)
  call("ZADD", key("pool", pool, "lanes"), (4000 - priority) * 1e11 + place - (again and 5e10 or 0), lane)
end

-- Note that a lane has its turn, so that no newcomer gets a place before it.
local function serve(pool, priority, score)
  local turns, field = key("pool", pool, "turns"), priority .. ":served"
  local place = tonumber(score) - (4000 - priority) * 1e11
  if place > tonumber(call("HGET", turns, field) or 0) then call("HSET", turns, field, place) end
end

-- Offer a queued job to its pool: in its lane of each build that wants it. A lane that is new queues up.
local function offer(job, cells)
  local lanes, again = key("pool", job.pool, "lanes"), tonumber(job.number) > 1
  for _, cell in ipairs(cells) do
    if cell.live then
      local lane = lanes_of(job, cell.build)[again and 2 or 1]
      call("ZADD", key("pool", job.pool, "ready", lane), job.rank, job.id)
      if not call("ZSCORE", lanes, lane) then queue_up(job.pool, lane, job.priority, again, not again) end
    end
  end
  wake(job.pool)
end

local function withdraw(job, cells)
  for _, cell in ipairs(cells) do
    for _, lane in ipairs(lanes_of(job, cell.build)) do
      if call("ZREM", key("pool", job.pool, "ready", lane), job.id) == 1
         and call("EXISTS", key("pool", job.pool, "ready", lane)) == 0 then
        call("ZREM", key("pool", job.pool, "lanes"), lane)
      end
    end
  end
end

-- A build has one job less under way: where that is bounded, its pools may have another for it.
local function landed(build)
  if (tonumber(call("HGET", key("build", build), "max_parallel") or 0)) > 0 then
    for _, pool in ipairs(call("SMEMBERS", key("build", build, "pools"))) do wake(pool) end
  end
end

-- Move a job in its pool: "waiting" (to be handed out), "handed" (to the broker), "running", "" (ended).
-- Callers write `where` with the job's other fields; it says the same.
local function place(job, where, cells)
  if job.where ~= "" then call("ZREM", key("pool", job.pool, job.where), job.id) end
  if where ~= "" then
    call("ZADD", key("pool", job.pool, where), where == "waiting" and job.queued_at or NOW, job.id)
  end
  if job.where == "running" then call("ZREM", key("leases"), job.id) end
  if where == "running" then call("ZADD", key("leases"), NOW + LEASE, job.id) end
  for _, cell in ipairs(cells) do
    if where == "handed" and cell.live then
      call("SADD", key("build", cell.build, "flying"), job.id)
    elseif (where == "waiting" or where == "") and call("SREM", key("build", cell.build, "flying"), job.id) == 1 then
      landed(cell.build)
    end
  end
  job.where = where
end

-- Put a job back to waiting, until `delay` has passed where there is one.
local function put_back(job, cells, delay)
  place(job, "waiting", cells)
  call("HSET", key("job", job.id), "where", "waiting")
  if delay > 0 then
    call("ZADD", key("delayed"), NOW + delay, job.id)
  else
    offer(job, cells)
  end
end

-- A job's priority is the largest among its live cells.
local function set_priority(job, cells)
  local priority = nil
  for _, cell in ipairs(cells) do
    if cell.live and (not priority or cell.priority > priority) then priority = cell.priority end
  end
  if not priority or priority == tonumber(job.priority) then return end
  local offered = job.where == "waiting" and not call("ZSCORE", key("delayed"), job.id)
  if offered then withdraw(job, cells) end
  job.priority = string.format("%d", priority)
  call("HSET", key("job", job.id), "priority", job.priority)
  if offered then offer(job, cells) end
end

-- End a job and its live cells, and let all that belongs to it expire.
local function end_job(job, cells, to, outcome, kind)
  local from = job.state
  if job.where == "waiting" then
    withdraw(job, cells)
    call("ZREM", key("delayed"), job.id)
  end
  place(job, "", cells)
  call("HSET", key("job", job.id), "state", to, "where", "", "ended_at", NOW, "outcome", outcome)
  local active = key("active", job.namespace, job.job_key)
  if call("GET", active) == job.id then call("DEL", active) end
  local about = {job = job.id, attempt = tonumber(job.number), worker = job.worker or nil,
                 started_at = tonumber(job.started_at) or nil, spent = tonumber(job.spent) or nil}
  local document = ending(about, outcome)
  for _, cell in ipairs(cells) do
    if cell.live then end_cell(cell.build, cell.identifier, from, to, job, document, kind) end
  end
  for _, part in ipairs({"", ":cells", ":attempts", ":log"}) do
    call("PEXPIRE", key("job", job.id) .. part, KEEP)
  end
end

-- A worker began or ended an attempt. One whose registration has expired comes back with a new one.
local function note_busy(worker)
  local record = key("worker", worker)
  if call("EXISTS", record) == 1 then call("HSET", record, "busy_at", NOW) end
end

local function end_attempt(job, how, outcome)
  job.spent = call("HINCRBY", key("job", job.id), "spent", NOW - job.started_at)
  call("HSET", key("job", job.id, "attempts"), job.number .. ":end", ending({["end"] = how}, outcome))
end

-- Start the next attempt: the job is queued again, and `node` is asked last for a while.
local function requeue(job, cells, delay, node, kind)
  local from = job.state
  local excluded = cjson.decode(job.excluded or "{}")
  if node then excluded[node] = NOW + delay + EXCLUDED end
  job.state, job.queued_at = "queued", NOW
  job.number = string.format("%d", job.number + 1)
  call("HSET", key("job", job.id), "state", "queued", "number", job.number, "queued_at", NOW,
       "charged", job.charged, "losses", job.losses, "excluded", cjson.encode(excluded))
  call("HDEL", key("job", job.id), "token", "nonce", "worker", "node", "started_at", "phase", "progress", "detail",
       "refused")
  put_back(job, cells, delay)
  move_cells(cells, job, from, "queued", kind)
end

-- Workers of a fenced node get no more jobs, until its health probe has passed or an operator lets it back.
local function fence(node, reason)
  local record = key("node", node)
  if call("HSETNX", record, "fenced_at", NOW) == 0 then return end
  call("HSET", record, "fenced", reason)
  call("HDEL", record, "row", "let_back")
  call("DEL", key("node", node, "passed"))
  call("PEXPIRE", record, KEEP)
end

local function unfence(node)
  local record = key("node", node)
  call("HDEL", record, "fenced", "fenced_at", "row")
  call("HSET", record, "let_back", NOW)
  call("PEXPIRE", record, KEEP)
  call("DEL", key("node", node, "passed"), key("node", node, "blamed"))
  for _, worker in ipairs(call("ZRANGEBYSCORE", key("workers"), NOW, "+inf")) do
    local found = call("HMGET", key("worker", worker), "node", "pools")
    if found[1] == node then
      for _, pool in ipairs(cjson.decode(found[2])) do wake(pool) end
    end
  end
end

-- A job failed in a way that may be its node's doing: how often in a row, and when last in this way.
local function note_failure(job, kind)
  if not BLAMES_NODE[kind] then return end
  local record = key("node", job.node)
  call("HINCRBY", record, "row", 1)
  call("HSET", record, "failed:" .. kind, NOW)
  call("PEXPIRE", record, KEEP)
end

-- A job was made on its node: it counts against the nodes where it had failed, unless this one had the same trouble then
-- (what failed everywhere for a while, such as object storage, was no node's doing).
local function note_success(job)
  local record = key("node", job.node)
  call("HDEL", record, "row")
  for number = 1, job.number - 1 do
    local past = call("HMGET", key("job", job.id, "attempts"), number .. ":start", number .. ":end")
    local start, over = past[1] and cjson.decode(past[1]), past[2] and cjson.decode(past[2])
    local kind = over and over["end"] == "failed" and over.outcome.kind
    if start and kind and BLAMES_NODE[kind] and start.node ~= job.node
       and tonumber(call("HGET", record, "failed:" .. kind) or 0) < over.at - TROUBLE then
      local blamed = key("node", start.node, "blamed")
      call("ZADD", blamed, NOW, job.id)
      call("ZREMRANGEBYSCORE", blamed, "-inf", NOW - COUNTS)
      call("PEXPIRE", blamed, COUNTS)
      local jobs = call("ZCARD", blamed)
      if jobs >= FENCING then fence(start.node, jobs .. " jobs failed on it and then succeeded elsewhere, the last by " .. kind) end
    end
  end
end

-- Keep how long an artifact took, as `farm/store/history.py` does.
local function remember(namespace, facts)
  if type(facts.work) ~= "table" then return end
  local history = key("history", namespace, facts.work.like)
  local when = (facts.created:gsub("%D", "")):sub(1, 14)
  call("ZADD", history, when, table.concat({facts.key, facts.work.model, string.format("%d", facts.work.size), facts.seconds}, " "))
  call("ZREMRANGEBYRANK", history, 0, -HISTORY - 1)
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
  elseif job.charged >= (ATTEMPTS[kind] or 1) then
    if job.losses >= LOSSES then
      call("HSET", key("job", job.id), "quarantined", "1")
      local document = cjson.decode(outcome)
      document.message = document.message .. "; three workers were lost with this job, so it is in quarantine: `farm reproduce "
        .. job.id .. "` writes what it was"
      outcome = cjson.encode(document)
    end
    call("HSET", key("job", job.id), "charged", job.charged, "losses", job.losses)
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

-- The jobs whose attempts a worker runs.
local function running_of(worker)
  local found = {}
  for _, id in ipairs(call("ZRANGE", key("leases"), 0, -1)) do
    if call("HGET", key("job", id), "worker") == worker then found[#found + 1] = read(id) end
  end
  return found
end

-- Why a worker on a node takes no jobs for now, or "".
local function rests(worker, node)
  local reason = call("HGET", key("worker", worker), "resting") or ""
  return reason ~= "" and reason or call("HGET", key("node", node), "fenced") or ""
end

-- Slots of the workers of a pool that take jobs, and their nodes; those that drain take nothing more.
local function live_slots(pool)
  local slots, nodes = 0, {}
  for _, worker in ipairs(call("ZRANGEBYSCORE", key("pool", pool, "workers"), NOW, "+inf")) do
    local found = call("HMGET", key("worker", worker), "slots", "node", "draining")
    if found[1] and found[3] ~= "1" and rests(worker, found[2]) == "" then
      slots = slots + tonumber(found[1])
      nodes[found[2]] = true
    end
  end
  return slots, nodes
end
