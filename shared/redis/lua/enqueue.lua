-- Enqueue sequences of one class, all or none. A sequence whose id is known changes nothing, so repeating is safe.
-- uses: streams
--
-- KEYS[1]          the stream
-- KEYS[2..n+1]     the sequences' hashes
-- KEYS[n+2..]      the class's other streams, for the bound
-- ARGV[1] group    the consumer group
-- ARGV[2] bound    most entries of the class that may wait undelivered; 0: no bound
-- ARGV[3] ttl      of stream and hashes, seconds
-- ARGV[4] n        how many sequences
-- ARGV[5..]        per sequence: id, group of the sequence, KV tokens, api, deadline ms, job, spec (msgpack)
-- Returns the number of new sequences, or -waiting-1 when the bound would be passed.
local stream, group, bound, ttl, n = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local new, seen = {}, {}
for i = 1, n do
  local key = KEYS[i + 1]
  if not seen[key] and redis.call('EXISTS', key) == 0 then new[#new + 1] = i end
  seen[key] = true
end
if #new == 0 then return 0 end

local function waiting(key)
  local _, leased = group_of(key, group)
  return leased and redis.call('XLEN', key) - leased or 0
end

if bound > 0 then
  local all = waiting(stream)
  for i = n + 2, #KEYS do all = all + waiting(KEYS[i]) end
  if all + #new > bound then return -all - 1 end
end
open_stream(stream, group, ttl)
for _, i in ipairs(new) do
  local a = 5 + (i - 1) * 7
  local entry = redis.call('XADD', stream, '*', 'id', ARGV[a], 'group', ARGV[a + 1], 'kv', ARGV[a + 2])
  redis.call('HSET', KEYS[i + 1], 'state', 'queued', 'stream', stream, 'entry', entry, 'attempt', 0, 'worker', '',
    'api', ARGV[a + 3], 'deadline', ARGV[a + 4], 'job', ARGV[a + 5], 'spec', ARGV[a + 6])
  redis.call('EXPIRE', KEYS[i + 1], ttl)
end
return #new
