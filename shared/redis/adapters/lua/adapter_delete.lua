-- Delete one version, unless it is the latest or somebody holds it.
-- KEYS[1] head hash   KEYS[2] versions   KEYS[3] pins   KEYS[4] manifest   KEYS[5] bytes hash
-- ARGV[1] name   ARGV[2] version   ARGV[3] event channel
-- Returns {status, owner}; status: ok, unknown, latest, pinned.
if redis.call('EXISTS', KEYS[4]) == 0 then
  redis.call('ZREM', KEYS[2], ARGV[2])
  return {'unknown', ''}
end
local latest = redis.call('HGET', KEYS[1], 'latest') or '0'
if latest == ARGV[2] then return {'latest', ''} end
local now = redis.call('TIME')
local at_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local prefix = ARGV[2] .. ':'
for _, pin in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. string.format('%.0f', at_ms), '+inf')) do
  if string.sub(pin, 1, #prefix) == prefix then return {'pinned', string.sub(pin, #prefix + 1)} end
end
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('UNLINK', KEYS[4], KEYS[5])
if redis.call('HGET', KEYS[1], 'best') == ARGV[2] then redis.call('HDEL', KEYS[1], 'best', 'best_value') end
redis.call('PUBLISH', ARGV[3], cjson.encode(
  {name = ARGV[1], change = 'deleted', version = tonumber(ARGV[2]), latest = tonumber(latest), at_ms = at_ms}))
return {'ok', ''}
