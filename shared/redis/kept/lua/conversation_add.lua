-- Add items to a conversation's end; those that it has stay where they are, so that this may be repeated.
-- uses: clock kept_things
-- KEYS[1] the conversation   KEYS[2] uses   KEYS[3] sizes   KEYS[4] its order
-- ARGV[1] prefix of the keeper's keys   ARGV[2] id   ARGV[3] ttl, seconds   ARGV[4] bound, bytes
-- ARGV[5] most items   ARGV[6] ids of its last prompt and answer ('' as they are)   ARGV[7...] item id, item
-- Returns 1; 0: no such conversation; -1: too many items; -2: more bytes than a keeper may have. Then nothing is added.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local size = tonumber(redis.call('HGET', KEYS[3], ARGV[2]) or '512')
local new = {}
for i = 7, #ARGV, 2 do
  if not redis.call('ZSCORE', KEYS[4], ARGV[i]) then new[#new + 1] = i end
end
if redis.call('ZCARD', KEYS[4]) + #new > tonumber(ARGV[5]) then return -1 end
local added = #ARGV[6] > 0 and #ARGV[6] - redis.call('HSTRLEN', KEYS[1], 'ids') or 0
for _, i in ipairs(new) do added = added + #ARGV[i] + #ARGV[i + 1] end
if size + added > tonumber(ARGV[4]) then return -2 end
for _, i in ipairs(new) do
  redis.call('ZADD', KEYS[4], redis.call('HINCRBY', KEYS[1], 'next', 1), ARGV[i])
  redis.call('HSET', KEYS[1], 'item:' .. ARGV[i], ARGV[i + 1])
end
if ARGV[6] ~= '' then redis.call('HSET', KEYS[1], 'ids', ARGV[6]) end
weigh(ARGV[1], ARGV[2], size + added, tonumber(ARGV[3]), tonumber(ARGV[4]))
return 1
