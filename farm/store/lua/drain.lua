-- The operator wants a worker to finish what it runs and stop. It hears of it at its next heartbeat; until then it is
-- refused what it claims.
-- keys: worker:<worker>
-- arguments: worker
-- answer: 1; 0 where there is no such worker
if call("EXISTS", key("worker", worker)) == 0 then return 0 end
call("HSET", key("worker", worker), "drain", "1", "draining", "1")
return 1
