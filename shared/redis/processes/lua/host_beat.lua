-- Write a host's heartbeat, and renew the leases of what it loads.
-- uses: clock
--
-- KEYS[1] heartbeat   KEYS[2] host ids   KEYS[3..6] entries, aliases, figures, loads   KEYS[7..] leases of what it loads
-- ARGV[1] id          ARGV[2] status, JSON   ARGV[3] ttl of the heartbeat, seconds   ARGV[4] ttl of the host ids
-- ARGV[5] ttl of the catalogue   ARGV[6] lease, ms   ARGV[7..] models of KEYS[7..]
-- Returns {'1' if the catalogue is there, model that another host has the lease of, ...}.
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
redis.call('ZADD', KEYS[2], now_ms(), ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[4])
for i = 3, 6 do redis.call('EXPIRE', KEYS[i], ARGV[5]) end
local said = {tostring(redis.call('EXISTS', KEYS[3]))}
for i = 7, #KEYS do
  redis.call('SET', KEYS[i], ARGV[1], 'NX', 'PX', ARGV[6]) -- one that a restarted Redis has lost
  if redis.call('GET', KEYS[i]) == ARGV[1] then redis.call('PEXPIRE', KEYS[i], ARGV[6])
  else said[#said + 1] = ARGV[i] end
end
return said
