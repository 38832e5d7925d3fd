-- Claim sequences for a worker: its own affinity, then the shared streams, interactive up to its quota, batch up to
-- its quota, then leftover rows lent to either class, then steal by age from other workers' affinity streams.
--
-- KEYS[1] own interactive  KEYS[2] interactive  KEYS[3] own batch  KEYS[4] batch
-- KEYS[5..]                other workers' streams: interactive, batch, interactive, batch, ...
-- ARGV[1] group            ARGV[2] worker
-- ARGV[3] rows             free rows
-- ARGV[4] interactive_first  ARGV[5] batch_first   quotas of the first round
-- ARGV[6] batch_max        most batch sequences in this call
-- ARGV[7] kv               free KV positions
-- ARGV[8] empty            1: the worker runs nothing, so one sequence may pass the KV budget (the engine then refuses it)
-- ARGV[9] steal_ms         age from which an entry may be stolen
-- ARGV[10] prefix          of sequence hashes
-- ARGV[11] max_deaths      deaths of its workers at which a sequence is given up
-- ARGV[12] ttl             refreshes the hash of a claimed sequence
-- Returns {last generated ids of KEYS[1..4], claims}; a claim is {stream, entry, spec, attempt, api, verdict} with
-- verdict 'run', 'cancelled', 'deadline' or 'poison'. Verdicts other than 'run' are leased like claims: the caller commits
-- their end.
local group, worker = ARGV[1], ARGV[2]
local rows, batch_left, kv = tonumber(ARGV[3]), tonumber(ARGV[6]), tonumber(ARGV[7])
local empty, steal_ms, prefix = ARGV[8] == '1', tonumber(ARGV[9]), ARGV[10]
local max_deaths, ttl = tonumber(ARGV[11]), ARGV[12]
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local claims = {}
local running = 0

local function field(entry, name)
  local f = entry[2]
  for i = 1, #f, 2 do if f[i] == name then return f[i + 1] end end
  return ''
end

local function last_delivered(stream)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups.err then return nil end
  for _, g in ipairs(groups) do
    local name, last
    for i = 1, #g, 2 do
      if g[i] == 'name' then name = g[i + 1] elseif g[i] == 'last-delivered-id' then last = g[i + 1] end
    end
    if name == group then return last end
  end
  redis.call('XGROUP', 'CREATE', stream, group, '0')
  return '0-0'
end

-- How many of the next entries fit into `limit` rows and the KV budget; a group is not begun when it does not fit
-- whole, unless it is larger than everything there is.
local function fitting(stream, limit, old_only)
  local last = last_delivered(stream)
  if not last then return 0 end
  local entries = redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', limit + 1)
  local n, tokens = 0, 0
  while n < #entries and n < limit do
    local entry = entries[n + 1]
    if old_only and now - tonumber(string.match(entry[1], '^%d+')) < steal_ms then break end
    local need = tonumber(field(entry, 'kv')) or 0
    if tokens + need > kv and not (empty and running == 0 and n == 0) then break end
    tokens = tokens + need
    n = n + 1
  end
  if n > 0 and n < #entries then
    local g = field(entries[n + 1], 'group')
    if g ~= '' and g == field(entries[n], 'group') then
      local whole = n
      while whole > 0 and field(entries[whole], 'group') == g do whole = whole - 1 end
      if whole > 0 then n = whole end
    end
  end
  return n
end

local function begin(stream, entry)
  local id = field(entry, 'id')
  local key = prefix .. id
  local h = redis.call('HMGET', key, 'state', 'spec', 'cancel', 'api', 'deadline')
  if not h[2] or h[1] == 'done' then
    redis.call('XACK', stream, group, entry[1])
    redis.call('XDEL', stream, entry[1])
    return false
  end
  local attempt = redis.call('HINCRBY', key, 'attempt', 1)
  local deaths = tonumber(redis.call('HGET', key, 'deaths') or '0')
  local verdict = 'run'
  local deadline = tonumber(h[5] or '0') or 0
  if h[3] then verdict = 'cancelled'
  elseif deadline > 0 and deadline <= now then verdict = 'deadline'
  elseif deaths >= max_deaths then verdict = 'poison' end
  redis.call('HSET', key, 'state', 'running', 'worker', worker, 'stream', stream, 'entry', entry[1], 'started', now)
  redis.call('EXPIRE', key, ttl)
  claims[#claims + 1] = {stream, entry[1], h[2], attempt, h[4] or '', verdict}
  if verdict == 'run' then
    running = running + 1
    kv = kv - (tonumber(field(entry, 'kv')) or 0)
    return true
  end
  return false
end

local function take(stream, limit, is_batch, old_only)
  local taken = 0
  while taken < limit do
    local n = fitting(stream, limit - taken, old_only)
    if n == 0 then break end
    local got = redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', n, 'STREAMS', stream, '>')
    if not got then break end
    for _, entry in ipairs(got[1][2]) do
      if begin(stream, entry) then taken = taken + 1 end
    end
  end
  rows = rows - taken
  if is_batch then batch_left = batch_left - taken end
  return taken
end

local function interactive(limit)
  local n = take(KEYS[1], math.min(limit, rows), false, false)
  take(KEYS[2], math.min(limit - n, rows), false, false)
end

local function batch(limit)
  local n = take(KEYS[3], math.min(limit, rows, batch_left), true, false)
  take(KEYS[4], math.min(limit - n, rows, batch_left), true, false)
end

local tips = {}
for i = 1, 4 do
  local info = redis.pcall('XINFO', 'STREAM', KEYS[i])
  tips[i] = '0-0'
  if not info.err then
    for j = 1, #info, 2 do if info[j] == 'last-generated-id' then tips[i] = info[j + 1] end end
  end
end
interactive(tonumber(ARGV[4]))
batch(tonumber(ARGV[5]))
interactive(rows)
batch(rows)
for i = 5, #KEYS do
  if rows <= 0 then break end
  local is_batch = i % 2 == 0
  take(KEYS[i], is_batch and math.min(rows, batch_left) or rows, is_batch, true)
end
return {tips, claims}
