-- Enqueue sequences, all or none. A sequence whose id is known changes nothing, so repeating the call is safe.
--
-- KEYS[1]            the stream
-- KEYS[2..n+1]       the sequences' hashes
-- ARGV[1] group      the consumer group
-- ARGV[2] bound      most entries that may wait undelivered; 0: no bound
-- ARGV[3] ttl        of stream and hashes, seconds
-- ARGV[4..]          per sequence: id, group of the sequence, KV tokens, api, spec (msgpack), deadline ms
-- Returns the number of new sequences, or -waiting-1 when the bound would be passed.
local stream, group = KEYS[1], ARGV[1]
local bound, ttl = tonumber(ARGV[2]), tonumber(ARGV[3])
local new = {}
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then new[#new + 1] = i end
end
if #new == 0 then return 0 end
if redis.call('EXISTS', stream) == 0 then redis.call('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM') end
if bound > 0 then
  local pending = redis.pcall('XPENDING', stream, group)
  local leased = (pending.err == nil) and pending[1] or 0
  local waiting = redis.call('XLEN', stream) - leased
  if waiting + #new > bound then return -waiting - 1 end
end
for _, i in ipairs(new) do
  local a = 4 + (i - 2) * 6
  local entry = redis.call('XADD', stream, '*', 'id', ARGV[a], 'group', ARGV[a + 1], 'kv', ARGV[a + 2])
  redis.call('HSET', KEYS[i], 'state', 'queued', 'stream', stream, 'entry', entry, 'attempt', 0,
    'api', ARGV[a + 3], 'spec', ARGV[a + 4], 'deadline', ARGV[a + 5])
  redis.call('EXPIRE', KEYS[i], ttl)
end
redis.call('EXPIRE', stream, ttl)
return #new
