-- End the attempts whose leases expired; a lost attempt is charged. If the node kept a finished program and did not
-- publish it, the attempt is not charged.
-- Nothing expires until this reaper has called for one whole lease without a gap: after an outage every worker gets the
-- time of a lease to renew. A gap is half a lease: a worker that renewed before it still has a quarter. A clock that
-- was set back also counts as a gap.
-- keys: reaper:<reaper>, leases, kept, job:<job> with :cells :attempts :log, active:…, pool:…, build:…, stopping,
--   wake:…
-- arguments: reaper, limit
-- answer: ids of the jobs whose attempts were lost
local mark = FARM .. "reaper:" .. reaper
local seen = call("HMGET", mark, "since", "last")
local since = tonumber(seen[1] or NOW)
if not seen[2] or math.abs(NOW - tonumber(seen[2])) > LEASE / 2 then since = NOW end
call("HSET", mark, "since", since, "last", NOW)
call("PEXPIRE", mark, LEASE)
if NOW - since < LEASE then return {} end

for _, id in ipairs(call("ZRANGEBYSCORE", FARM .. "leases", NOW + LEASE + 1, "+inf")) do
  call("ZADD", FARM .. "leases", NOW + LEASE, id)  -- given before the clock was set back
end
local lost = call("ZRANGEBYSCORE", FARM .. "leases", "-inf", NOW, "LIMIT", 0, limit)
for _, id in ipairs(lost) do
  local job = read(id)
  if not job or job.state ~= "running" then
    call("ZREM", FARM .. "leases", id)
  else
    lose(job, "stopped renewing its lease")
  end
end
local gone = call("ZRANGEBYSCORE", FARM .. "kept", "-inf", NOW, "LIMIT", 0, limit)
for _, id in ipairs(gone) do
  local job = read(id)
  if not job or job.state ~= "running" then
    call("ZREM", FARM .. "kept", id)
  else
    local hours = string.format("%g", HOLD / 3600000)
    give_back(job, "node " .. job.node .. " did not bring the finished program within " .. hours .. " h")
  end
  lost[#lost + 1] = id
end
return lost
