-- Answer a request, and with it, or alone, make a new state or a save count: all or nothing.
-- KEYS[1] learner   KEYS[2] its requests   KEYS[3] answer   KEYS[4] new state   KEYS[5] the state before
-- KEYS[6] saves   KEYS[7] saved bytes   KEYS[8] the bytes of the save that had this name
-- ARGV[1] epoch   ARGV[2] number   ARGV[3] answer, '' for none   ARGV[4] its ttl, seconds   ARGV[5] ttl of the learner
-- ARGV[6] id of the new state, '' for none   ARGV[7] name of the save, '' for none   ARGV[8] what is known of it
-- ARGV[9] its ttl, seconds   ARGV[10] ttl of the list of saves, seconds
-- Returns 1; 0 when another service has the learner, or it is gone.
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
if ARGV[3] ~= '' then
  redis.call('SET', KEYS[3], ARGV[3], 'NX', 'EX', ARGV[4])
  local done = tonumber(redis.call('HGET', KEYS[1], 'done') or '0')
  if tonumber(ARGV[2]) > done then redis.call('HSET', KEYS[1], 'done', ARGV[2]) end
end
if ARGV[6] ~= '' then
  local applied = tonumber(redis.call('HGET', KEYS[1], 'applied') or '0')
  local bytes = tonumber(redis.call('HGET', KEYS[1], 'bytes') or '0')
  for number = applied + 1, tonumber(ARGV[2]) do
    local field = string.format('%d', number)
    bytes = bytes - redis.call('HSTRLEN', KEYS[2], field)
    redis.call('HDEL', KEYS[2], field)
  end
  redis.call('HSET', KEYS[1], 'applied', ARGV[2], 'state', ARGV[6], 'bytes', string.format('%d', bytes))
  if KEYS[5] ~= KEYS[4] then redis.call('DEL', KEYS[5]) end
  redis.call('EXPIRE', KEYS[4], ARGV[5])
end
if ARGV[7] ~= '' then
  redis.call('HSET', KEYS[6], ARGV[7], ARGV[8])
  redis.call('EXPIRE', KEYS[6], ARGV[10])
  if KEYS[8] ~= KEYS[7] then redis.call('DEL', KEYS[8]) end
  redis.call('EXPIRE', KEYS[7], ARGV[9])
end
redis.call('EXPIRE', KEYS[1], ARGV[5])
redis.call('EXPIRE', KEYS[2], ARGV[5])
return 1
