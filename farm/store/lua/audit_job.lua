-- Report contradictions about a job: the lists that it is in, its name, its cells, its successes. Changes nothing.
-- keys: job:<job> with :cells :attempts, active:<namespace>:<job key>, leases, kept, delayed, pool:<pool>:waiting
--   :handed :running :left :levels :firsts:<level> :turns:<level> :ready:<level>:<build>, build:<build>:states :live
-- arguments: job
-- answer: list of sentences
local id = job
local job = read(id)
local problems = {}
local function wrong(...) problems[#problems + 1] = string.format(...) end
if not job then return problems end

for _, where in ipairs({"waiting", "handed", "running"}) do
  local listed = call("ZSCORE", POOL .. job.pool .. ":" .. where, id) and true or false
  if listed ~= (job.where == where) then
    wrong("is %s, but %s among its pool's %s", job.where == "" and job.state or job.where,
          listed and "listed" or "not listed", where)
  end
end
if job.where ~= "running" and call("SISMEMBER", POOL .. job.pool .. ":left", id) == 1 then
  wrong("is %s, but counts as uploading", job.state)
end
local leased = (call("ZSCORE", FARM .. "leases", id) or call("ZSCORE", FARM .. "kept", id)) and true or false
if leased ~= (job.state == "running") then wrong("is %s %s a lease", job.state, leased and "with" or "without") end

-- Whether a lane of the job's level will have its turn.
local level = level_of(job)
local function queued(build)
  return call("ZSCORE", POOL .. job.pool .. ":levels", level)
    and (call("ZSCORE", POOL .. job.pool .. ":firsts:" .. level, build)
         or call("ZSCORE", POOL .. job.pool .. ":turns:" .. level, build))
end

local cells, in_lane = cells_of(job), false
for _, cell in ipairs(cells) do
  local state = call("HGET", BUILD .. cell.build .. ":states", cell.identifier)
  if cell.live and state ~= job.state then
    wrong("is %s, but its cell %s of %s is %s", job.state, cell.identifier, cell.build, state or "gone")
  end
  if call("ZSCORE", lane_of(job.pool, level, cell.build), id) and queued(cell.build) then in_lane = true end
end
local named = call("GET", FARM .. "active:" .. job.namespace .. ":" .. job.job_key) == id
if job.state == "queued" or job.state == "running" then
  if not job.cancelling and not named then wrong("is %s, but is not the one of its key", job.state) end
  if not job.cancelling and not any_live(cells) then wrong("is %s, but nobody wants it", job.state) end
else
  if named then wrong("is %s, but still the one of its key", job.state) end
  if any_live(cells) then wrong("is %s, but has live cells", job.state) end
end
if job.where == "waiting" and not in_lane and not call("ZSCORE", FARM .. "delayed", id) then
  wrong("waits, but will never be handed out")
end

local published, attempts = 0, call("HGETALL", JOB .. id .. ":attempts")
for i = 1, #attempts, 2 do
  local over = attempts[i]:match(":end$") and cjson.decode(attempts[i + 1])
  if over and over["end"] == "succeeded" then published = published + 1 end
end
if published > 1 then wrong("succeeded %d times", published) end
return problems
