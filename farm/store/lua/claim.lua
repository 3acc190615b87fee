-- A worker asks for the attempt that a message names.
-- keys: job:<job> with :cells :attempts, leases, delayed, pool:<pool>:handed :waiting :running :low :levels :workers,
--   worker:<worker>, worker:locks:<kernel>, node:<node>, build:<build> with :states :flying :events, wake:pools,
--   paused, unserved
-- arguments: job, attempt, nonce, token, worker, node
--   nonce: the worker's, so that a repeated claim gets the same answer; token: the attempt's, if it starts
-- answer: ["run", token, order, seconds, bytes, namespace, key, build, 1 if a live worker of the same kernel has other
--   lock files (as one in another container may), kinds of earlier attempts…], ["stale"] (drop the message) or
--   ["elsewhere"] (this node failed the job and another node should try first, or it is fenced, rests or drains; the
--   worker already runs a job that may kill workers; or the job is paused)

local AGAIN = 250   -- how long a job waits after it met a node that must not have it: often the one with a free slot
local LONE = 1000   -- how long at most, where few wait
local CROWDED = 50  -- how long for each job that waits, where many do: they are offered twenty times a second in all
local APART = 5000  -- how long a job that may be what kills workers waits at most until it is offered again

local id = job
local job = read(id)
if not job then return {"stale"} end

-- How long a refused job waits: twice as long each time, so that refused jobs leave this worker time for others; but no
-- longer than necessary, because another node can become free at any moment.
local function refusal(job, most)
  local crowd = math.max(LONE, CROWDED * call("ZCARD", FARM .. "delayed"))
  return math.min(AGAIN * 2 ^ (call("HINCRBY", JOB .. job.id, "refused", 1) - 1), crowd, most)
end

local function is_split()
  local locks = call("HGET", WORKER .. worker, "locks") or ""
  local kernel = locks:match("^%S+")
  local known = kernel and call("HGETALL", WORKER .. "locks:" .. kernel) or {}
  for i = 1, #known, 2 do
    if known[i + 1] ~= locks and call("EXISTS", WORKER .. known[i]) == 1 then return 1 end
  end
  return 0
end

local function run()
  local answer = {"run", job.token, call("HGET", JOB .. id, "order"), job.time, job.memory, job.namespace, job.key,
                  job.build, is_split()}
  for number = 1, job.number - 1 do
    local past = call("HGET", JOB .. id .. ":attempts", number .. ":end")
    answer[#answer + 1] = past and cjson.decode(past).outcome.kind or ""
  end
  for i, value in ipairs(answer) do if value == cjson.null then answer[i] = "" end end
  return answer
end

if job.state == "running" and job.nonce == nonce then return run() end
if job.where ~= "handed" or tonumber(job.number) ~= tonumber(attempt) then return {"stale"} end

local cells = cells_of(job)
if paused_by(job, cells) then  -- since it was handed out
  put_back(job, cells, 0)
  return {"elsewhere"}
end
if rests(worker, node) ~= "" or call("HGET", WORKER .. worker, "draining") == "1" then
  put_back(job, cells, AGAIN)
  return {"elsewhere"}
end
local excluded = cjson.decode(job.excluded or "{}")
if excluded[node] and excluded[node] > NOW then
  local _, nodes = live_slots(job.pool)
  for other in pairs(nodes) do
    if not (excluded[other] and excluded[other] > NOW) then
      put_back(job, cells, refusal(job, excluded[node] - NOW))
      wake(job.pool)  -- Less urgent ones that were started before may have waited for this one to leave the broker.
      return {"elsewhere"}
    end
  end
end
if tonumber(job.losses) >= LOSSES - 1 then
  for _, other in ipairs(running_of(worker)) do
    if tonumber(other.losses) >= LOSSES - 1 then
      -- Either of them may be what kills workers. Apart, the next loss says which.
      put_back(job, cells, refusal(job, APART))
      wake(job.pool)
      return {"elsewhere"}
    end
  end
end

local time, memory = nil, nil
for _, cell in ipairs(cells) do
  if cell.live then
    time = time and larger(time, cell.time) or cell.time
    memory = memory and larger(memory, cell.memory) or cell.memory
  end
end
job.time, job.memory = tostring(time or 0), string.format("%.0f", memory or 0)
job.token, job.worker, job.node = token, worker, node
call("HSET", JOB .. id, "state", "running", "where", "running", "token", token, "nonce", nonce, "worker", worker,
     "node", node, "started_at", NOW, "time", job.time, "memory", job.memory)
call("HSET", JOB .. id .. ":attempts", job.number .. ":token", token, job.number .. ":start",
     cjson.encode({worker = worker, node = node, started_at = NOW, time = time or 0, memory = memory or 0}))
place(job, "running", cells)
note_busy(worker)
call("HDEL", FARM .. "unserved", job.pool)
move_cells(cells, job, "queued", "running")
-- Jobs that were started before may have waited for this one to be taken.
local first = levels_of(job.pool)[1]
if first and (is_again(first)
   or call("ZCARD", POOL .. job.pool .. ":handed") <= tonumber(call("GET", POOL .. job.pool .. ":low") or 0)) then
  wake(job.pool)
end
return run()
