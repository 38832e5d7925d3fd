-- Keep a version from being deleted until a time; the same owner's later pin replaces its earlier one.
-- KEYS[1] pins   KEYS[2] manifest   KEYS[3...] keys whose time to live the use renews
-- ARGV[1] version   ARGV[2] owner   ARGV[3] for how long, milliseconds   ARGV[4] time to live of the others, seconds
-- Returns 1, or 0 when there is no such version.
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
local now = redis.call('TIME')
local at_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', at_ms))
redis.call('ZADD', KEYS[1], string.format('%.0f', at_ms + ARGV[3]), ARGV[1] .. ':' .. ARGV[2])
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
redis.call('PEXPIREAT', KEYS[1], last)
for i = 2, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[4]) end
return 1
