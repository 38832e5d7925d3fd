-- Give verdicts to answers, each of which gets one: to all of them, or to none.
-- uses: clock kept_things
-- KEYS[1] uses   KEYS[2] sizes   KEYS[3] what waits, KEYS[4] what is judged, by time   KEYS[5...] the answers
-- ARGV[1] prefix of the keeper's keys   ARGV[2] ttl, seconds   ARGV[3] bound, bytes   ARGV[4] idempotency key
-- ARGV[5...] name, verdict, JSON
-- Returns 1, also when just this has been said before; 0 when an answer is not there, or has another verdict.
local function said_of(i) return ARGV[2 * i - 5], ARGV[2 * i - 4] end

for i = 5, #KEYS do
  local _, verdict = said_of(i)
  local before = redis.call('HGET', KEYS[i], 'verdict')
  if redis.call('EXISTS', KEYS[i]) == 0 then return 0 end
  if before and before ~= verdict then return 0 end
end
for i = 5, #KEYS do use(ARGV[1], (said_of(i)), tonumber(ARGV[2])) end -- so that none of them makes room
for i = 5, #KEYS do
  local name, verdict = said_of(i)
  if redis.call('HSETNX', KEYS[i], 'verdict', verdict) == 1 then
    redis.call('HSET', KEYS[i], 'key', ARGV[4])
    redis.call('ZADD', KEYS[4], redis.call('ZSCORE', KEYS[3], name) or now_ms(), name)
    redis.call('EXPIRE', KEYS[4], ARGV[2])
    redis.call('ZREM', KEYS[3], name)
    local size = tonumber(redis.call('HGET', KEYS[2], name) or '512')
    weigh(ARGV[1], name, size + #verdict + #ARGV[4], tonumber(ARGV[2]), tonumber(ARGV[3]))
  end
end
return 1
