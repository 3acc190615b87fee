-- A worker's health probe ended. A failed probe fences the node; the fence is lifted when the probes of all its live
-- workers have passed twice in a row.
-- keys: node:<node> with :passed :blamed, workers, worker:<worker>, wake:pools
-- arguments: node, worker, wrong, row
--   wrong: why it failed, "" = it passed; row: how many passed in a row since the worker learnt that its node is fenced
-- answer: why the node is fenced now, or "" if it is not; nil if the worker has to register first

local PASSES = 2  -- so many health probes in a row let a fenced node back

if call("EXISTS", WORKER .. worker) == 0 then return false end
local record, passed = NODE .. node, NODE .. node .. ":passed"
if wrong ~= "" then
  fence(node, "its health probe failed: " .. wrong)
  call("HDEL", passed, worker)
elseif call("HEXISTS", record, "fenced") == 0 then
  call("HDEL", record, "row")
else
  call("HSET", passed, worker, row)
  call("PEXPIRE", passed, KEEP)
  local all = true
  for _, other in ipairs(call("ZRANGEBYSCORE", FARM .. "workers", NOW, "+inf")) do
    if call("HGET", WORKER .. other, "node") == node then
      all = all and tonumber(call("HGET", passed, other) or 0) >= PASSES
    end
  end
  if all then unfence(node) end
end
return call("HGET", record, "fenced") or ""
