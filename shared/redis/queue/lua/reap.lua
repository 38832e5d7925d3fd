-- Take sequences away from workers that have not renewed their leases. They go to the handed back stream of their class,
-- which is claimed before what has not begun, and each counts one death more. From `suspect_after` deaths on a sequence
-- goes to the suspects, in parties (streams.lua); one that has had `max_deaths`, and was alone at the last, is leased to
-- the caller, who commits its end. Whoever goes on with one learns who had it. What waits for a worker without a
-- heartbeat moves, too.
-- uses: streams
--
-- KEYS[1] handed back interactive  KEYS[2] handed back batch  KEYS[3] suspects interactive  KEYS[4] suspects batch
-- KEYS[5..]         streams to look through: interactive, batch, interactive, batch, ...; the first 2 * shared of them
--                   are nobody's
-- ARGV[1] group     ARGV[2] worker     ARGV[3] lease_ms   ARGV[4] prefix of sequence hashes
-- ARGV[5] max_deaths  ARGV[6] suspect_after  ARGV[7] ttl
-- ARGV[8] shared    see KEYS[5..]
-- ARGV[9..]         heartbeat keys of the workers of the streams that follow
-- Returns {number of leases that had run out, claims as claim.lua returns them, with verdict 'poison DEATHS'}.
local group, worker, lease_ms, prefix = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local max_deaths, suspect_after, ttl, shared = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local AT_ONCE = 256
local now = server_ms()
local poison = {}
local reclaimed = 0
local suspects = {[0] = {}, [1] = {}} -- by class, then by the worker that had them: in the order in which they are found

local function settle(stream, entry, is_batch)
  local id = fields_of(entry).id or ''
  if not is_hash(prefix .. id) then return drop(stream, group, entry[1]) end
  local h = redis.call('HMGET', prefix .. id, 'state', 'spec', 'api', 'job', 'worker')
  if h[1] ~= 'running' then return drop(stream, group, entry[1]) end
  reclaimed = reclaimed + 1
  local deaths = count_up(prefix .. id, 'deaths')
  if not is_poison(prefix .. id, deaths, max_deaths) then
    local owner = h[5] or ''
    redis.call('HSET', prefix .. id, 'kv_at', owner)
    if deaths < suspect_after then return move(stream, group, entry, KEYS[1 + is_batch], prefix, ttl) end
    local of_class = suspects[is_batch]
    if not of_class[owner] then
      of_class[owner] = {}
      of_class[#of_class + 1] = owner
    end
    table.insert(of_class[owner], {stream, entry})
    return
  end
  redis.call('XCLAIM', stream, group, worker, 0, entry[1], 'JUSTID')
  local attempt = count_up(prefix .. id, 'attempt')
  redis.call('HSET', prefix .. id, 'worker', worker, 'stream', stream, 'entry', entry[1], 'started', now)
  poison[#poison + 1] = {stream, entry[1], id, h[2] or '', attempt, h[3] or '', h[4] or '', 'poison ' .. deaths}
end

local function reap(stream, is_batch)
  for _, pending in ipairs(redis.call('XPENDING', stream, group, 'IDLE', lease_ms, '-', '+', AT_ONCE)) do
    local entries = redis.call('XRANGE', stream, pending[1], pending[1])
    if entries[1] then settle(stream, entries[1], is_batch) else redis.call('XACK', stream, group, pending[1]) end
  end
end

-- A worker without heartbeat leaves its affinity stream to all; the stream goes when nothing is leased in it.
local function dissolve(stream, is_batch)
  for _, entry in ipairs(undelivered(stream, group, AT_ONCE)) do
    move(stream, group, entry, KEYS[1 + is_batch], prefix, ttl)
  end
  if redis.call('XLEN', stream) == 0 then redis.call('DEL', stream) end
end

for i = 5, #KEYS do
  local is_batch = (i + 1) % 2
  if group_of(KEYS[i], group) then
    reap(KEYS[i], is_batch)
    local owner = math.floor((i - 5) / 2) - shared
    if owner >= 0 and redis.call('EXISTS', ARGV[9 + owner]) == 0 then dissolve(KEYS[i], is_batch) end
  end
end
for is_batch, of_class in pairs(suspects) do
  for _, owner in ipairs(of_class) do
    divide(of_class[owner], owner .. '@' .. now, group, KEYS[3 + is_batch], prefix, ttl)
  end
end
return {reclaimed, poison}
