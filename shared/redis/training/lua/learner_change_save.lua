-- Change a save while it is still the one that was read: another one may have its name by now, or it may be gone.
-- KEYS[1] the learner's saves   KEYS[2] the save's bytes
-- ARGV[1] the save's name   ARGV[2] it as it was read   ARGV[3] as it is to be, "" to drop it
-- ARGV[4] ttl of its bytes   ARGV[5] ttl of the saves, seconds
-- Returns 1 when it was changed.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return 0
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('UNLINK', KEYS[2])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
  redis.call('EXPIRE', KEYS[1], ARGV[5])
  redis.call('EXPIRE', KEYS[2], ARGV[4])
end
return 1
