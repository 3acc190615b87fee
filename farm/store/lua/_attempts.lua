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
       "refused", "kept")
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
    call("HSET", JOB .. job.id, "charged", job.charged, "losses", job.losses)
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
