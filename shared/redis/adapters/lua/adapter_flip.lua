-- Move `latest` to a version that exists: forward (promoted) or to any other one (rolled_back).
-- uses: split_close
--
-- KEYS[1] head hash   KEYS[2] versions   KEYS[3] log of flips   KEYS[4] prefix of the manifests (same hash tag)
-- KEYS[5] the split of its requests   KEYS[6] answers whose reward that has
-- ARGV[1] name   ARGV[2] version, or '': the newest below latest that has been it   ARGV[3] promoted | rolled_back
-- ARGV[4] flip only if latest is this, or ''   ARGV[5] reason for the log   ARGV[6] time to live, seconds
-- ARGV[7] event channel   ARGV[8] the version's manifest from now on, JSON, or ''
-- ARGV[9] id of the split whose verdict this is, or ''   ARGV[10] that verdict, JSON
-- Returns {status, latest}; status: ok, unknown, rejected (by its gate), stale (promote of an older one), moved, none,
-- over (that split has ended). Any other than ok has changed nothing.
local latest = tonumber(redis.call('HGET', KEYS[1], 'latest') or '0')
if ARGV[4] ~= '' and latest ~= tonumber(ARGV[4]) then return {'moved', latest} end
if ARGV[9] ~= '' then
  local id, verdict, moved = unpack(redis.call('HMGET', KEYS[5], 'id', 'verdict', 'moved'))
  if id ~= ARGV[9] or verdict or moved then return {'over', latest} end
end

local function status(version)
  local manifest = redis.call('GET', KEYS[4] .. version)
  if not manifest then return nil end
  return cjson.decode(manifest).status
end

local target
if ARGV[2] ~= '' then
  target = ARGV[2]
  local found = status(target)
  if not found then return {'unknown', latest} end
  if found ~= 'published' then return {'rejected', latest} end
else
  -- A candidate that nobody has promoted may never have passed its gate: only what was served is gone back to.
  local served = {}
  for _, entry in ipairs(redis.call('XRANGE', KEYS[3], '-', '+')) do
    for i = 1, #entry[2], 2 do
      if entry[2][i] == 'version' then served[entry[2][i + 1]] = true end
    end
  end
  for _, candidate in ipairs(redis.call('ZREVRANGEBYSCORE', KEYS[2], '(' .. latest, 1)) do
    if served[candidate] and status(candidate) == 'published' then target = candidate break end
  end
  if not target then return {'none', latest} end
end

local version = tonumber(target)
local function write_manifest()
  if ARGV[8] ~= '' then redis.call('SET', KEYS[4] .. target, ARGV[8], 'KEEPTTL') end
end
if version == latest then
  write_manifest()
  return {'ok', latest}
end
local high = tonumber(redis.call('HGET', KEYS[1], 'high') or '0')
if ARGV[3] == 'promoted' then
  if version < high then return {'stale', latest} end
  redis.call('HSET', KEYS[1], 'high', version)
end
local now = redis.call('TIME')
local at_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('HSET', KEYS[1], 'latest', version)
write_manifest()
if ARGV[9] ~= '' then
  redis.call('HSET', KEYS[5], 'verdict', ARGV[10])
  redis.call('UNLINK', KEYS[6])
else
  split_close(KEYS[5], KEYS[6], version)
end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*',
  'version', version, 'previous', latest, 'reason', ARGV[5], 'at_ms', string.format('%.0f', at_ms))
for i = 1, 3 do redis.call('EXPIRE', KEYS[i], ARGV[6]) end
redis.call('PUBLISH', ARGV[7], cjson.encode(
  {name = ARGV[1], change = ARGV[3], version = version, latest = version, at_ms = at_ms}))
return {'ok', version}
