-- Workers and their nodes.

local FENCING = 3       -- so many different jobs that failed on a node and then succeeded elsewhere fence it
local COUNTS = 86400000 -- how long each of them counts
local REMEMBERED = 3600000
local TROUBLE = 600000  -- a node that failed in the same way so shortly before says nothing against another

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

-- Why no worker of a pool takes jobs; nil if one does. It is nil too if one rests because object storage is away: that
-- is the whole farm's trouble, and costs no job.
local function unserved_because(pool)
  local why = "none is live"
  for _, worker in ipairs(call("ZRANGEBYSCORE", POOL .. pool .. ":workers", NOW, "+inf")) do
    local found = call("HMGET", WORKER .. worker, "slots", "node", "draining")
    if found[1] then
      local reason = found[3] == "1" and "it drains" or rests(worker, found[2])
      if reason == "" or reason:find("^object storage") then return nil end
      why = "node " .. found[2] .. " takes none: " .. reason
    end
  end
  return why
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

-- A job was made on its node: that counts against the nodes on which it had failed. It does not if this node had the
-- same trouble then: what failed everywhere for a while, such as object storage, was not a node's doing.
-- Outside `main` a compiler may be hostile, and fail on one node alone: a namespace counts again a day after its jobs
-- had fenced the node.
local function note_success(job)
  local record = NODE .. job.node
  call("HDEL", record, "row")
  for number = 1, job.number - 1 do
    local past = call("HMGET", JOB .. job.id .. ":attempts", number .. ":start", number .. ":end")
    local start, over = past[1] and cjson.decode(past[1]), past[2] and cjson.decode(past[2])
    local kind = over and over["end"] == "failed" and over.outcome.kind
    if start and kind and BLAMES_NODE[kind] and start.node ~= job.node
       and tonumber(call("HGET", record, "failed:" .. kind) or 0) < over.at - TROUBLE
       and (job.namespace == "main"
            or tonumber(call("HGET", NODE .. start.node, "heard:" .. job.namespace) or 0) < NOW - COUNTS) then
      local blamed = NODE .. start.node .. ":blamed"
      call("ZADD", blamed, NOW, job.id)
      call("ZREMRANGEBYSCORE", blamed, "-inf", NOW - COUNTS)
      call("PEXPIRE", blamed, COUNTS)
      local jobs = call("ZCARD", blamed)
      if jobs >= FENCING then
        fence(start.node, jobs .. " jobs failed on it and then succeeded elsewhere, the last by " .. kind)
        call("HSET", NODE .. start.node, "heard:" .. job.namespace, NOW)
      end
    end
  end
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

-- Keep how long an artifact took, as `farm/store/index_records.py` does.
local function remember(namespace, facts)
  if type(facts.work) ~= "table" then return end
  local history = FARM .. "history:" .. namespace .. ":" .. facts.work.like
  local when = (facts.created:gsub("%D", "")):sub(1, 14)
  local size = string.format("%d", facts.work.size)
  call("ZADD", history, when, table.concat({facts.key, facts.work.model, size, facts.seconds}, " "))
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
