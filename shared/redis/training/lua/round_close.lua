-- A round is over: its average counts, once.
-- KEYS[1] rounds, KEYS[2] the average's bytes, KEYS[3] those of the round before, KEYS[4] the round's changes
-- ARGV[1] the round, ARGV[2] state, ARGV[3] taken, ARGV[4] ttl in seconds
-- Returns 1, or 0 when it is over already.
if redis.call('HGET', KEYS[1], 'round') ~= tostring(ARGV[1] - 1) then return 0 end
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'round', ARGV[1], 'state', ARGV[2], 'taken', ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
redis.call('EXPIRE', KEYS[3], 600) -- somebody may be reading it
redis.call('UNLINK', KEYS[4])
return 1
