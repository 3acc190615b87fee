-- The operator wants a worker to finish its attempts and stop. Its next heartbeat gets the request; until then its
-- claims are refused.
-- keys: worker:<worker>
-- arguments: worker
-- answer: 1; 0 if there is no such worker
if call("EXISTS", WORKER .. worker) == 0 then return 0 end
call("HSET", WORKER .. worker, "drain", "1", "draining", "1")
return 1
