-- Mark a namespace's index as complete, unless the store lost its data while the index was filled.
-- keys: epoch, index:<namespace>:facts:complete
-- arguments: namespace, begun
--   begun: the epoch in which filling began
-- answer: none
if call("HGET", FARM .. "epoch", "epoch") ~= begun then return end
call("SET", FARM .. "index:" .. namespace .. ":facts:complete", 1)
