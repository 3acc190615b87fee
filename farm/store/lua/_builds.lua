-- Shared by all scripts: time, keys, wake-ups, events. `scripts.py` puts this and the other files with an underscore
-- in front of each script, after the constants LEASE, KEEP, RETRY (milliseconds), EVENTS (entries that a build's stream
-- keeps), HISTORY (durations kept of one sort), ATTEMPTS (charged attempts by failure kind) and BLAMES_NODE (kinds that
-- the node may have caused).
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
