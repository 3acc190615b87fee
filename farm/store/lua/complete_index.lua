-- Mark a namespace's index as complete, unless the store lost its data while the index was filled.
-- keys: epoch, index:<namespace>:complete
-- arguments: namespace, begun
--   begun: the epoch in which filling began
-- answer: 1 if it is complete, else 0
if call("HGET", FARM .. "epoch", "epoch") ~= begun then return 0 end
call("SET", FARM .. "index:" .. namespace .. ":complete", 1)
return 1
