-- Open a build once: repeating the same id changes nothing.
-- keys: build:<build>, builds:<namespace>, namespaces, incomplete, unreported, wake:builds, build:<build>:events
-- arguments: build, namespace, cells, max_parallel, fail_fast, document
--   cells: their final number; max_parallel: 0 = no bound; fail_fast: 1 or 0; document: JSON, kept unchanged
-- answer: 1 if the build is new, 0 if it exists, -1 if another namespace has a build with this id
local owner = call("HGET", BUILD .. build, "namespace")
if owner then return owner == namespace and 0 or -1 end
call("HSET", BUILD .. build, "state", "open", "namespace", namespace, "cells", cells, "accepted", 0,
     "max_parallel", max_parallel, "fail_fast", fail_fast, "created_at", NOW, "document", document)
call("ZADD", FARM .. "builds:" .. namespace, NOW, build)
call("SADD", FARM .. "namespaces", namespace)
event(build, {"type", "build", "state", "open"})
if cells == "0" then close(build) else call("ZADD", FARM .. "incomplete", NOW, build) end
return 1
