-- Write an entry of the catalogue. May be repeated.
--
-- KEYS[1] entries   KEYS[2] aliases   KEYS[3] figures
-- ARGV[1] ttl, seconds    ARGV[2] most entries
-- ARGV[3] name            ARGV[4] entry, JSON
-- ARGV[5] '*' any, '' only where there is none, '-' never, else only in the place of exactly this entry
-- ARGV[6] figures, JSON; '' leaves them as they are
-- ARGV[7..] its aliases
-- Returns {'ok'}, {'other'} (ARGV[5] does not hold), {'full'}, or {'taken', alias or name, name of the entry that has it}.
local name = ARGV[3]
local there = redis.call('HGET', KEYS[1], name)
if not there and redis.call('HLEN', KEYS[1]) > tonumber(ARGV[2]) then return {'full'} end
local holder = redis.call('HGET', KEYS[2], name)
if holder then return {'taken', name, holder} end
for i = 7, #ARGV do
  holder = redis.call('HGET', KEYS[2], ARGV[i])
  if holder and holder ~= name then return {'taken', ARGV[i], holder} end
  if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then return {'taken', ARGV[i], ARGV[i]} end
end
if ARGV[6] ~= '' then redis.call('HSET', KEYS[3], name, ARGV[6]) end
local may = ARGV[5] == '*' or (there or '') == ARGV[5]
if may then
  local aliases = redis.call('HGETALL', KEYS[2])
  for i = 1, #aliases, 2 do
    if aliases[i + 1] == name then redis.call('HDEL', KEYS[2], aliases[i]) end
  end
  for i = 7, #ARGV do redis.call('HSET', KEYS[2], ARGV[i], name) end
  redis.call('HSET', KEYS[1], name, ARGV[4])
  redis.call('HSET', KEYS[1], '', '') -- the catalogue is there, even without a model: `host_beat.lua`
end
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[1]) end
return {may and 'ok' or 'other'}
