-- Delete an adapter with all its versions, unless somebody holds one of them. The version counter stays.
-- KEYS[1] head hash   KEYS[2] versions   KEYS[3] pins   KEYS[4] acks   KEYS[5] log of flips
-- KEYS[6] prefix of the manifests   KEYS[7] prefix of the bytes (both with the same hash tag)
-- KEYS[8] the split of its requests   KEYS[9] answers whose reward that has
-- ARGV[1] name   ARGV[2] event channel
-- Returns {status, pin or number of versions}; status: ok, unknown, pinned.
local now = redis.call('TIME')
local at_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local pin = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. string.format('%.0f', at_ms), '+inf', 'LIMIT', 0, 1)[1]
if pin then return {'pinned', pin} end
if redis.call('EXISTS', KEYS[1]) == 0 then return {'unknown', ''} end
local versions = redis.call('ZRANGE', KEYS[2], 0, -1)
for _, version in ipairs(versions) do redis.call('UNLINK', KEYS[6] .. version, KEYS[7] .. version) end
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[8], KEYS[9])
redis.call('PUBLISH', ARGV[2], cjson.encode(
  {name = ARGV[1], change = 'deleted', version = 0, latest = 0, at_ms = at_ms}))
return {'ok', #versions}
