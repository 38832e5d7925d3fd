-- Place a request; one of the same number stays what it is.
-- KEYS[1] learner   KEYS[2] its requests
-- ARGV[1] number   ARGV[2] request   ARGV[3] ttl, seconds   ARGV[4] most requests that wait   ARGV[5] most bytes
-- Returns 1; 0 when too many wait; -1 when there is no such learner; -2 when the number is too far ahead.
local learner = redis.call('HMGET', KEYS[1], 'spec', 'done', 'bytes')
if not learner[1] then return -1 end
redis.call('EXPIRE', KEYS[1], ARGV[3])
local ahead = tonumber(ARGV[1]) - tonumber(learner[2] or '0')
if ahead <= 0 or redis.call('HEXISTS', KEYS[2], ARGV[1]) == 1 then return 1 end
if ahead > 4 * tonumber(ARGV[4]) then return -2 end
-- The next one is always taken, or the others would wait for it for ever.
local bytes = tonumber(learner[3] or '0') + #ARGV[2]
if ahead > 1 and (redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[4]) or bytes > tonumber(ARGV[5])) then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[1], 'bytes', string.format('%d', bytes))
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
