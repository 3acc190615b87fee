-- A build joins its concurrency group. Every build does so after its cells are there, so of two that are accepted at
-- once at least the second one to join sees both.
-- keys: group:<namespace>:<group>, cancels:<namespace>:<group>, build:<build>
-- arguments: build, namespace, group, at, cancels
--   at: when it was submitted; cancels: 1 if it takes the place of older builds, else 0
-- answer: ["", or the newest build that takes the place of older ones; the open builds of the group that are older]
local members, newest = FARM .. "group:" .. namespace .. ":" .. group, FARM .. "cancels:" .. namespace .. ":" .. group
call("ZADD", members, at, build)
if cancels == "1" then call("ZADD", newest, at, build) end
call("ZREMRANGEBYRANK", newest, 0, -2)
for _, name in ipairs({members, newest}) do call("PEXPIRE", name, KEEP) end
local last = call("ZRANGE", newest, 0, -1, "WITHSCORES")
local answer = {last[1] or ""}
for _, member in ipairs(call("ZRANGE", members, 0, -1)) do
  if call("HGET", BUILD .. member, "state") ~= "open" then
    call("ZREM", members, member)
  elseif last[1] then
    local joined, limit = tonumber(call("ZSCORE", members, member)), tonumber(last[2])
    if joined < limit or (joined == limit and member < last[1]) then answer[#answer + 1] = member end
  end
end
return answer
