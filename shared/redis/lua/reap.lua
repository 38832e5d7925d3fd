-- Take over sequences whose lease has run out. Each takeover counts one death of the sequence; one that has killed
-- `suspect_after` workers is given out alone and only to an empty worker, so that innocents beside it are not given up.
--
-- KEYS[1..]         streams
-- ARGV[1] group     ARGV[2] worker   ARGV[3] lease_ms   ARGV[4] limit
-- ARGV[5] prefix    of sequence hashes
-- ARGV[6] max_deaths  ARGV[7] suspect_after  ARGV[8] empty (1: the worker runs nothing)  ARGV[9] ttl
-- Returns claims as claim.lua does, with the further verdict 'alone': run it, and nothing beside it.
local group, worker, lease, limit = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local prefix, max_deaths, suspect_after = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local empty, ttl = ARGV[8] == '1', ARGV[9]
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local claims = {}
local taken = 0

local function settle(stream, pending)
  local entry, owner = pending[1], pending[2]
  local found = redis.call('XRANGE', stream, entry, entry)
  if #found == 0 then
    redis.call('XACK', stream, group, entry)
    return
  end
  local id = ''
  local f = found[1][2]
  for i = 1, #f, 2 do if f[i] == 'id' then id = f[i + 1] end end
  local key = prefix .. id
  local h = redis.call('HMGET', key, 'state', 'spec', 'cancel', 'api', 'deadline', 'deaths')
  if not h[2] or h[1] == 'done' then
    redis.call('XACK', stream, group, entry)
    redis.call('XDEL', stream, entry)
    return
  end
  -- An unclean end counts as a death; a released sequence (owner empty) does not.
  local deaths = tonumber(h[6] or '0') or 0
  local released = redis.call('HGET', key, 'worker') == ''
  local next_deaths = released and deaths or deaths + 1
  local verdict = 'run'
  local deadline = tonumber(h[5] or '0') or 0
  if h[3] then verdict = 'cancelled'
  elseif deadline > 0 and deadline <= now then verdict = 'deadline'
  elseif next_deaths >= max_deaths then verdict = 'poison' end
  local suspect = next_deaths >= suspect_after
  if verdict == 'run' and suspect and not (empty and taken == 0) then return end
  redis.call('XCLAIM', stream, group, worker, 0, entry, 'JUSTID')
  local attempt = redis.call('HINCRBY', key, 'attempt', 1)
  redis.call('HSET', key, 'state', 'running', 'worker', worker, 'stream', stream, 'entry', entry, 'started', now,
    'deaths', next_deaths)
  redis.call('EXPIRE', key, ttl)
  claims[#claims + 1] = {stream, entry, h[2], attempt, h[4] or '', (verdict == 'run' and suspect) and 'alone' or verdict}
  if verdict == 'run' then
    taken = taken + 1
    if suspect then limit = 0 end
  end
end

for _, stream in ipairs(KEYS) do
  if taken >= limit then break end
  local pending = redis.pcall('XPENDING', stream, group, 'IDLE', lease, '-', '+', 64)
  if not pending.err then
    for _, p in ipairs(pending) do
      if taken < limit then settle(stream, p) end
    end
  end
end
return claims
