-- Make an entry due now, or as soon as its owner gives it back.
-- uses: clock due
-- ARGV[1] entry   ARGV[2] ttl, seconds
local now, who = tonumber(now_ms()), whose(ARGV[1])
local at = redis.call('ZSCORE', list_of(who), ARGV[1])
if not at then return end
local owner = redis.call('HGET', KEYS[2], ARGV[1])
if owner and tonumber(at) > now then
  if string.sub(owner, -1) ~= '!' then redis.call('HSET', KEYS[2], ARGV[1], owner .. '!') end
elseif tonumber(at) > now then
  redis.call('ZADD', list_of(who), string.format('%d', now), ARGV[1])
  settle(who, now, ARGV[2])
end
