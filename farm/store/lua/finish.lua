-- An attempt ended. The policy of its failure kind decides what follows.
-- keys: job:<job> with :cells :attempts :log, active:<namespace>:<job key>, quarantined:…, leases, kept, delayed,
--   pool:<pool>:…, build:<build> with :live :states :ends :flying :events, stopping, unreported, wake:…,
--   index:<namespace>:facts, node:<node> with :blamed :passed, worker:<worker>, history:<namespace>:<like>
-- arguments: job, token, how, kind, outcome, facts, hit
--   how: the attempt's end; kind: the failure kind or ""; outcome: JSON, kept unchanged; facts: as the index of the
--   artifact's namespace keeps them; hit: 1 if the artifact was found, so nothing was tried
-- answer: "ok", also for a repeated call until the job is packed; "superseded" if the attempt had lost its lease

local FENCING = 3       -- so many different jobs that failed on a node and then succeeded elsewhere fence it
local COUNTS = 86400000 -- how long each of them counts
local TROUBLE = 600000  -- a node that failed in the same way so shortly before says nothing against another

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

-- Keep how long an artifact took, as `farm/store/store.py` does.
local function remember(namespace, facts)
  if type(facts.work) ~= "table" then return end
  local history = FARM .. "history:" .. namespace .. ":" .. facts.work.like
  local when = (facts.created:gsub("%D", "")):sub(1, 14)
  local size = string.format("%d", facts.work.size)
  call("ZADD", history, when, table.concat({facts.key, facts.work.model, size, facts.seconds}, " "))
  call("ZREMRANGEBYRANK", history, 0, -HISTORY - 1)
end

local id = job
local job = read(id)
if not job then return "superseded" end
if job.state ~= "running" or job.token ~= token then
  local number = token:match("^(%d+)-")
  local attempts = JOB .. id .. ":attempts"
  if number and call("HGET", attempts, number .. ":token") == token then
    local past = call("HGET", attempts, number .. ":end")
    local over = past and cjson.decode(past)["end"] or "lost"
    if over ~= "lost" and over ~= "superseded" then return "ok" end
    call("HSET", attempts, number .. ":end", ending({["end"] = "superseded"}, outcome))
  end
  return "superseded"
end

if how == "released" and job.kept and not job.cancelling then return "ok" end  -- its program is yet to come
local cells = cells_of(job)
end_attempt(job, how, outcome)
note_busy(job.worker)
local said = cjson.decode(outcome)
if said.fences and said.fences ~= "" then fence(job.node, said.fences) end
if how == "succeeded" then
  -- In the same step: who sees the job ended finds its artifact in the index. A tuning that was cut short has a key of
  -- its own.
  local namespace = said.facts.namespace or job.namespace
  call("DEL", FARM .. "quarantined:" .. job.namespace .. ":" .. job.job_key)
  if hit ~= "1" then
    note_success(job)
    remember(namespace, said.facts)
  end
  call("HSET", FARM .. "index:" .. namespace .. ":facts", said.facts.key or job.key, facts)
  end_job(job, cells, "succeeded", outcome)
elseif job.cancelling then
  end_job(job, cells, "cancelled", outcome)
elseif how ~= "failed" then
  requeue(job, cells, 0)
elseif not is_measurement(job)
    and (kind == "time_limit" or (kind == "out_of_memory" and job.charged + 1 >= ATTEMPTS[kind])) then
  -- Final for the cells that asked for no more than this attempt had; the others go on.
  local asked, had = "time", tonumber(job.time)
  if kind == "out_of_memory" then asked, had = "memory", tonumber(job.memory) end
  local content, others = {}, false
  for _, cell in ipairs(cells) do
    if cell.live then
      if larger(cell[asked], had) == had then content[#content + 1] = cell else others = true end
    end
  end
  if not others then
    end_job(job, cells, "failed", outcome, kind)
  else
    local document = ending(about(job), outcome)
    for _, cell in ipairs(content) do
      end_cell(cell.build, cell.identifier, "running", "failed", job, document, kind)
      cell.live = false
    end
    set_priority(job, cells)
    requeue(job, cells, 0, nil, kind)
  end
else
  charge(job, cells, kind, outcome)
end
return "ok"
