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
