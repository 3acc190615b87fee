-- Say why queued jobs wait. Changes nothing.
-- keys: job:<job> with :cells :attempts, delayed, paused, build:<build> with :live :flying, worker:<worker>,
--   node:<node>, pool:<pool>:workers :handed :levels :firsts:<level> :turns:<level> :ready:<level>:<build>
-- arguments: jobs
--   jobs: JSON list of job ids
-- answer: list of JSON objects, "" for a job that is not there: `live_workers` of its pool, `slots` of those that take
--   jobs, `resting` (why none of them does), `ahead` (about how many jobs go first), `handed_out`, `delayed_until`
--   (milliseconds), `bounded_by` (a build at its max_parallel), `paused` (pool or build), `before` (the fields of
--   :attempts of the attempt before this one); fields that do not apply are left out

-- The live workers of a pool, the slots of those that take jobs, and the reason if none of them does.
local function service(pool)
  local live, works, reason = 0, false, nil
  for _, worker in ipairs(call("ZRANGEBYSCORE", POOL .. pool .. ":workers", NOW, "+inf")) do
    local node, resting = unpack(call("HMGET", WORKER .. worker, "node", "resting"))
    if node then
      local fenced, why = call("HGET", NODE .. node, "fenced"), nil
      if fenced then
        why = "node " .. node .. " is fenced: " .. fenced
      elseif resting and resting ~= "" then
        why = "node " .. node .. " takes no jobs: " .. resting
      end
      live, works, reason = live + 1, works or not why, reason or why
    end
  end
  return {live_workers = live, slots = live_slots(pool), resting = not works and reason or nil}
end

-- The lanes of a pool as they are handed out: a list of levels, each with its `name` and the jobs in each build's lane.
local function lanes_of(pool)
  local found = {}
  for _, level in ipairs(levels_of(pool)) do
    local sizes = {}
    for _, queue in ipairs({"firsts", "turns"}) do
      for _, build in ipairs(call("ZRANGE", POOL .. pool .. ":" .. queue .. ":" .. level, 0, -1)) do
        sizes[build] = call("ZCARD", lane_of(pool, level, build))
      end
    end
    found[#found + 1] = {name = level, sizes = sizes}
  end
  return found
end

-- About how many jobs go before a job that waits in a lane: all jobs of higher levels, and from each other lane at its
-- own level at most as many as from its own lane.
local function ahead(job, cells, lanes)
  local level, rank, mine = level_of(job), nil, {}
  for _, cell in ipairs(cells) do
    local found = call("ZRANK", lane_of(job.pool, level, cell.build), job.id)
    if found then rank, mine[cell.build] = math.min(rank or found, found), true end
  end
  if not rank then return 0 end
  -- Jobs in the broker go first, too, but not before a job that was started before.
  local count = is_again(level) and rank or rank + call("ZCARD", POOL .. job.pool .. ":handed")
  for _, one in ipairs(lanes) do
    for build, size in pairs(one.sizes) do
      if one.name ~= level then
        count = count + size
      elseif not mine[build] then
        count = count + math.min(size, rank + 1)
      end
    end
    if one.name == level then break end
  end
  return count
end

local pools, answers = {}, {}
for position, id in ipairs(cjson.decode(jobs)) do
  local job = read(id)
  if job then
    local cells = cells_of(job)
    pools[job.pool] = pools[job.pool] or {service = service(job.pool), lanes = lanes_of(job.pool)}
    local pool, found = pools[job.pool], {}
    for name, value in pairs(pool.service) do found[name] = value end
    found.ahead = ahead(job, cells, pool.lanes)
    found.handed_out = job.where == "handed"
    found.delayed_until = tonumber(call("ZSCORE", FARM .. "delayed", id))
    found.paused = paused_by(job, cells)
    for _, cell in ipairs(cells) do
      if cell.live and not found.bounded_by and is_full(cell.build) then found.bounded_by = cell.build end
    end
    found.before = {}
    for _, part in ipairs({":start", ":end"}) do
      local name = string.format("%d", job.number - 1) .. part
      found.before[name] = call("HGET", JOB .. id .. ":attempts", name) or nil
    end
    answers[position] = cjson.encode(found)
  else
    answers[position] = ""
  end
end
return answers
