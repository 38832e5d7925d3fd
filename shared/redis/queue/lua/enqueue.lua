-- Enqueue sequences of one class, all or none. A sequence whose id is known changes nothing, so repeating is safe.
-- They go to the least busy of the preferred workers, to the shared stream when each of them is busy, leaving or dead.
-- uses: streams
--
-- KEYS[1] the class's shared stream   KEYS[2] its handed back stream   KEYS[3], KEYS[4] the same of the other class
-- KEYS[5..n+4]     the sequences' hashes
-- KEYS[n+5..]      per preferred worker: heartbeat, its stream of the class, its stream of the other class
-- ARGV[1] group    the consumer group
-- ARGV[2] bound    most entries of the class that may wait undelivered; 0: no bound
-- ARGV[3] ttl      of stream and hashes, seconds
-- ARGV[4] n        how many sequences
-- ARGV[5] share    of a worker's rows; from there on it is busy
-- ARGV[6] timely   most that may wait so that these have their first tokens in time; -1: as many as there are
-- ARGV[7] idle_ms  `timely` counts once something has waited for so long: a worker with a free row is sooner
-- ARGV[8] hosts    the channel on which hosts hear of a model that no worker has
-- ARGV[9..]        per sequence: id, group of the sequence, KV tokens, api, deadline ms, job, spec (msgpack),
--                  first token's deadline ms; then the preferred workers' ids
-- Returns the number of new sequences, or -waiting-1 when a bound would be passed.
local group, bound, ttl, n, share = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local timely = tonumber(ARGV[6])
local FIELDS = 8
local BEAT_MS = 10000  -- a worker without a heartbeat for so long has died
local new, seen = {}, {}
for i = 1, n do
  local key = KEYS[i + 4]
  if not seen[key] and redis.call('EXISTS', key) == 0 then new[#new + 1] = i end
  seen[key] = true
end
if #new == 0 then return 0 end

local function waiting(key)
  local _, leased = group_of(key, group)
  return leased and redis.call('XLEN', key) - leased or 0
end

-- What a worker has claimed of a stream; exact, unlike its heartbeat.
local function leased_by(worker, key)
  if not group_of(key, group) then return 0 end
  for _, each in ipairs(redis.call('XPENDING', key, group)[4] or {}) do
    if each[1] == worker then return tonumber(each[2]) end
  end
  return 0
end

-- The least busy preferred worker that can begin at once: the number of its keys, or nil.
local function preferred()
  local best, best_load = nil, share
  for i = 0, (#KEYS - n - 4) / 3 - 1 do
    local worker, at = ARGV[9 + n * FIELDS + i], n + 5 + 3 * i
    local h = redis.call('HMGET', KEYS[at], 'state', 'max_rows')
    local rows = tonumber(h[2] or '0') or 0
    if h[1] == 'ready' and rows > 0 then
      local load = waiting(KEYS[at + 1]) + waiting(KEYS[at + 2])
      for _, key in ipairs({KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[at + 1], KEYS[at + 2]}) do
        load = load + leased_by(worker, key)
      end
      if load / rows < best_load and load + #new <= rows then best, best_load = at, load / rows end
    end
  end
  return best
end

local function waits_since(ms)
  for i = 1, 2 do
    local first = undelivered(KEYS[i], group, 1)[1]
    if first and server_ms() - tonumber(string.match(first[1], '^%d+')) >= ms then return true end
  end
  return false
end

local target = preferred()
local stream = target and KEYS[target + 1] or KEYS[1]
if bound > 0 or timely >= 0 then
  local all = waiting(KEYS[1]) + waiting(KEYS[2]) + (target and waiting(stream) or 0)
  local late = timely >= 0 and all + #new > timely and waits_since(tonumber(ARGV[7]))
  if late or (bound > 0 and all + #new > bound) then return -all - 1 end
end
open_stream(stream, group, ttl)
for _, i in ipairs(new) do
  local a = 9 + (i - 1) * FIELDS
  local entry = redis.call('XADD', stream, '*', 'id', ARGV[a], 'group', ARGV[a + 1], 'kv', ARGV[a + 2])
  redis.call('HSET', KEYS[i + 4], 'state', 'queued', 'stream', stream, 'entry', entry, 'attempt', 0, 'worker', '',
    'api', ARGV[a + 3], 'deadline', ARGV[a + 4], 'job', ARGV[a + 5], 'spec', ARGV[a + 6],
    'first', ARGV[a + 7])
  redis.call('EXPIRE', KEYS[i + 4], ttl)
end
local workers = string.match(KEYS[1], '^(.*):queue:') .. ':workers'
if redis.call('ZCOUNT', workers, server_ms() - BEAT_MS, '+inf') == 0 then
  redis.pcall('PUBLISH', ARGV[8], '')  -- they look anyway, only later
end
return #new
