-- Write fields of a response, of a conversation, or of a policy's state.
-- uses: clock kept_things
-- KEYS[1] the thing   KEYS[2] uses   KEYS[3] sizes   (the keys of things that are let go share their slot)
-- ARGV[1] prefix of the keeper's keys   ARGV[2] id   ARGV[3] ttl, seconds   ARGV[4] bound, bytes
-- ARGV[5] new: only if it is not there; there: only if it is; running: only before its end; any
-- ARGV[6] only while its field `at` says this, ''   ARGV[7...] field, value
-- Returns 1; 0 when it is not as ARGV[5] says; -1 when a new one does not fit beside what still runs.
local wanted, exists = ARGV[5], redis.call('EXISTS', KEYS[1]) == 1
if wanted == 'new' and exists then return 0 end
if wanted == 'there' and not exists then return 0 end
if wanted == 'running' and not runs(ARGV[1], ARGV[2]) then return 0 end
if ARGV[6] ~= '' then
  local at, later = redis.call('HGET', KEYS[1], 'at'), nil
  for i = 7, #ARGV, 2 do if ARGV[i] == 'at' then later = ARGV[i + 1] end end
  if at ~= ARGV[6] and (not at or at ~= later) then return 0 end -- written already: this is the same call again
end
redis.call('HSET', KEYS[1], unpack(ARGV, 7))
local size = 512
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do size = size + redis.call('HSTRLEN', KEYS[1], field) end
weigh(ARGV[1], ARGV[2], size, tonumber(ARGV[3]), tonumber(ARGV[4]))
if wanted == 'new' and tonumber(redis.call('HGET', KEYS[3], 'all')) > tonumber(ARGV[4]) then
  forget(ARGV[1], ARGV[2])
  return -1
end
return 1
