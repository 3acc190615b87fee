-- An operator lets a fenced node back.
-- keys: node:<node> with :passed :blamed, workers, worker:<worker>, wake:pools
-- arguments: node
-- answer: 1; 0 when it was not fenced
if call("HEXISTS", key("node", node), "fenced") == 0 then return 0 end
unfence(node)
return 1
