-- Take entries that are due: they are due again when the lease is over.
-- uses: clock
-- KEYS[1] entries by time   KEYS[2] their owners
-- ARGV[1] most   ARGV[2] lease, milliseconds   ARGV[3] ttl, seconds   ARGV[4] owner
-- Returns the entries.
local now = tonumber(now_ms())
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
for _, entry in ipairs(due) do
  redis.call('ZADD', KEYS[1], string.format('%d', now + ARGV[2]), entry)
  redis.call('HSET', KEYS[2], entry, ARGV[4])
end
if #due > 0 then
  redis.call('EXPIRE', KEYS[1], ARGV[3])
  redis.call('EXPIRE', KEYS[2], ARGV[3])
end
return due
