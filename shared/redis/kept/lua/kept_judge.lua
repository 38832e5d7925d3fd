-- Give verdicts to answers, each of which gets one: to all of them, or to none.
-- uses: clock keeping
-- KEYS[1] uses   KEYS[2] sizes   KEYS[3...] the answers
-- ARGV[1] prefix of the keeper's keys   ARGV[2] ttl, seconds   ARGV[3] bound, bytes   ARGV[4] idempotency key
-- ARGV[5...] name, verdict, JSON
-- Returns 1, also when just this has been said before; 0 when an answer is not there, or has another verdict.
for i = 3, #KEYS do
  local said = redis.call('HGET', KEYS[i], 'verdict')
  if redis.call('EXISTS', KEYS[i]) == 0 then return 0 end
  if said and said ~= ARGV[2 * i] then return 0 end
end
for i = 3, #KEYS do
  if redis.call('HSETNX', KEYS[i], 'verdict', ARGV[2 * i]) == 1 then
    redis.call('HSET', KEYS[i], 'key', ARGV[4])
    local name = ARGV[2 * i - 1]
    local size = tonumber(redis.call('HGET', KEYS[2], name) or '512')
    weigh(ARGV[1], name, size + #ARGV[2 * i] + #ARGV[4], tonumber(ARGV[2]), tonumber(ARGV[3]))
  end
end
return 1
