-- Make an uploaded version visible, and flip `latest` to it. All or nothing; the same call again changes nothing.
-- uses: policy_owner split_close
--
-- KEYS[1] head hash   KEYS[2] versions   KEYS[3] manifest   KEYS[4] bytes hash   KEYS[5] log of flips
-- KEYS[6] what the policy's trainer tells   KEYS[7] the split of its requests   KEYS[8] answers whose reward that has
-- ARGV[1] name   ARGV[2] version   ARGV[3] manifest JSON   ARGV[4] chunks that the bytes must have
-- ARGV[5] sha256 of the base, or ''   ARGV[6] '1': flip latest   ARGV[7] flip only if latest is this, or ''
-- ARGV[8] time to live, seconds   ARGV[9] event channel   ARGV[10] who owns the adapter
-- Returns {status, latest}; status: ok, torn (bytes incomplete), base (another base model), moved (ARGV[7] does not
-- hold), taken (the name is another owner's).
local version = tonumber(ARGV[2])
local latest = tonumber(redis.call('HGET', KEYS[1], 'latest') or '0')
if redis.call('EXISTS', KEYS[3]) == 1 then return {'ok', latest} end
if redis.call('HLEN', KEYS[4]) ~= tonumber(ARGV[4]) then return {'torn', latest} end
local owner = policy_owner(KEYS[1], KEYS[6])
if owner and owner ~= ARGV[10] then return {'taken', latest} end
local base = redis.call('HGET', KEYS[1], 'base') or ''
if base ~= '' and ARGV[5] ~= '' and base ~= ARGV[5] then return {'base', latest} end
if ARGV[7] ~= '' and latest ~= tonumber(ARGV[7]) then return {'moved', latest} end

redis.call('SET', KEYS[3], ARGV[3])
redis.call('ZADD', KEYS[2], version, version)
if base == '' then redis.call('HSET', KEYS[1], 'base', ARGV[5]) end
if ARGV[10] ~= '' then redis.call('HSET', KEYS[1], 'tenant', ARGV[10]) end
local now = redis.call('TIME')
local at_ms = now[1] * 1000 + math.floor(now[2] / 1000)
-- `high` is the highest version that publishing ever made the latest: a publisher that comes late never moves
-- `latest` backwards, and does not undo a rollback either.
local high = tonumber(redis.call('HGET', KEYS[1], 'high') or '0')
if ARGV[6] == '1' and version > high then
  redis.call('HSET', KEYS[1], 'latest', version, 'high', version)
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', 1000, '*',
    'version', version, 'previous', latest, 'reason', 'published', 'at_ms', string.format('%.0f', at_ms))
  latest = version
  split_close(KEYS[7], KEYS[8], latest)
end
for i = 1, 5 do redis.call('EXPIRE', KEYS[i], ARGV[8]) end
redis.call('PUBLISH', ARGV[9], cjson.encode(
  {name = ARGV[1], change = 'published', version = version, latest = latest, at_ms = at_ms}))
return {'ok', latest}
