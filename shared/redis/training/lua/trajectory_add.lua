-- Add a scored trajectory to its policy's stream, once.
-- uses: bounded
--
-- KEYS[1] stream   KEYS[2] its stats   KEYS[3] ids that were added
-- ARGV[1] group    ARGV[2] id   ARGV[3] trajectory, JSON   ARGV[4] most entries   ARGV[5] most bytes   ARGV[6] ttl
-- Returns 1 when it is new, else 0.
if redis.call('ZSCORE', KEYS[3], ARGV[2]) then return 0 end
append_bounded(KEYS[1], KEYS[2], ARGV[1], ARGV[6], tonumber(ARGV[4]), tonumber(ARGV[5]), #ARGV[3],
  {'id', ARGV[2], 'd', ARGV[3]})
local now = tonumber(redis.call('TIME')[1])
redis.call('ZADD', KEYS[3], now, ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - 3600)
redis.call('EXPIRE', KEYS[3], ARGV[6])
return 1
