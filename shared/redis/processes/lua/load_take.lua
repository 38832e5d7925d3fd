-- Take the lease to load a model, if nothing has happened since the caller has decided to. May be repeated.
--
-- KEYS[1] lease   KEYS[2] loads   KEYS[3] entries
-- ARGV[1] host id   ARGV[2] lease, ms   ARGV[3] model   ARGV[4] loads of the model that the caller knew of
-- ARGV[5] ttl of `loads`, seconds
-- Returns 1 if the host has the lease.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 1
end
if redis.call('HEXISTS', KEYS[3], ARGV[3]) == 0 or (redis.call('HGET', KEYS[2], ARGV[3]) or '0') ~= ARGV[4] then
  return 0
end
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
redis.call('HINCRBY', KEYS[2], ARGV[3], 1)
redis.call('EXPIRE', KEYS[2], ARGV[5])
return 1
