-- Lift a node's fence for the operator.
-- keys: node:<node> with :passed :blamed, workers, worker:<worker>, wake:pools
-- arguments: node
-- answer: 1; 0 if it was not fenced
if call("HEXISTS", NODE .. node, "fenced") == 0 then return 0 end
unfence(node)
return 1
