-- The operator wants a worker to finish what it runs and stop; it hears of it at its next heartbeat.
-- keys: worker:<worker>
-- arguments: worker
-- answer: 1; 0 where there is no such worker
if call("EXISTS", key("worker", worker)) == 0 then return 0 end
call("HSET", key("worker", worker), "drain", "1")
return 1
