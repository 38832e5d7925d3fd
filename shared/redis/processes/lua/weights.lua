-- Say what a worker computes with; returns what other weights live workers of its model have.
-- uses: clock
-- KEYS[1] the model's weights, by the last heartbeat of any worker that has them
-- ARGV[1] the worker's   ARGV[2] ttl of a heartbeat, seconds
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now_ms() - 1000 * ARGV[2])
redis.call('ZADD', KEYS[1], now_ms(), ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
local others = {}
for _, weights in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if weights ~= ARGV[1] then others[#others + 1] = weights end
end
return others
