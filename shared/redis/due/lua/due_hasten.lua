-- Make an entry due now, or as soon as its owner gives it back.
-- uses: clock
-- KEYS[1] entries by time   KEYS[2] their owners   ARGV[1] entry
local at = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not at then return end
local now = tonumber(now_ms())
local owner = redis.call('HGET', KEYS[2], ARGV[1])
if owner and tonumber(at) > now then
  if string.sub(owner, -1) ~= '!' then redis.call('HSET', KEYS[2], ARGV[1], owner .. '!') end
elseif tonumber(at) > now then
  redis.call('ZADD', KEYS[1], string.format('%d', now), ARGV[1])
end
