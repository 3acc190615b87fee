-- Lanes: in which order the jobs of a pool are handed out.

local TURN = 4  -- places from one turn to the next; on those between (3), builds may have their first

-- The two lanes of a job's priority in a build: for new jobs, and for those that were started before. An older release
-- had the first for both.
local function lanes_of(job, build)
  local lane = job.priority .. "|" .. build
  return {lane, lane .. "|again"}
end

-- Give a lane its place: by priority, then turn; those of jobs that were started before are the first of their
-- priority. A build that has had no turn yet comes before those that have had: on a place between two turns, where so
-- many fit that a stream of small builds leaves the others a turn after every third (docs/decisions/0027).
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
