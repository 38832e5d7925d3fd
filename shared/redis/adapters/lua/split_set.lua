-- Begin a split of an adapter's requests. One over the same versions that still runs goes on with its rewards, so that
-- this may be repeated.
-- KEYS[1] the split   KEYS[2] answers whose reward it has   KEYS[3] the adapter's head
-- ARGV[1] new id   ARGV[2] terms, JSON   ARGV[3] versions   ARGV[4] the latest version that it was checked against
-- ARGV[5] most rewards   ARGV[6] now, Unix milliseconds   ARGV[7] time to live, seconds
-- Returns {status, id or latest}; status: ok, moved (another version is the latest), unknown.
local latest = redis.call('HGET', KEYS[3], 'latest')
if not latest then return {'unknown', ''} end
if latest ~= ARGV[4] then return {'moved', latest} end
local id, versions, began_at, verdict, moved =
  unpack(redis.call('HMGET', KEYS[1], 'id', 'versions', 'latest', 'verdict', 'moved'))
if not id or verdict or moved or versions ~= ARGV[3] or began_at ~= latest then
  redis.call('UNLINK', KEYS[1], KEYS[2])
  id = ARGV[1]
  redis.call('HSET', KEYS[1], 'id', id, 'versions', ARGV[3], 'latest', latest, 'started_ms', ARGV[6])
end
redis.call('HSET', KEYS[1], 'terms', ARGV[2], 'most', ARGV[5])
for i = 1, 2 do redis.call('EXPIRE', KEYS[i], ARGV[7]) end
return {'ok', id}
