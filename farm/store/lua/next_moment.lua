-- A moment that is later than all others that were given, also where the server's clock was set back: submissions, and
-- what people choose, are ordered by it.
-- keys: moment
-- arguments: now
--   now: by the server's clock, in milliseconds
-- answer: the moment, in milliseconds
local moment = math.max(tonumber(now), tonumber(call("GET", FARM .. "moment") or 0) + 1)
call("SET", FARM .. "moment", string.format("%.0f", moment), "PXAT", string.format("%.0f", moment + 1000))
return string.format("%.0f", moment)
