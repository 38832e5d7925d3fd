-- Claim sequences for a worker. In this order: a party of suspects, with nothing beside it; own affinity, handed back and shared streams,
-- interactive up to its quota, then batch up to its quota; rows left over to either class; then what other workers leave
-- lying in their affinity streams.
-- uses: streams letters
--
-- KEYS[1] own interactive   KEYS[2] handed back interactive   KEYS[3] interactive   KEYS[4] suspects interactive
-- KEYS[5..8]                the same of batch
-- KEYS[9]                   string: the worker whose turn it is to run suspects
-- KEYS[10] dead letters
-- KEYS[11..]                other workers' streams: interactive, batch, interactive, batch, ...
-- ARGV[1] group             ARGV[2] worker
-- ARGV[3] rows              free rows
-- ARGV[4] interactive_first ARGV[5] batch_first: quotas of the first round
-- ARGV[6] batch_max         most batch sequences in this call
-- ARGV[7] kv                free KV positions
-- ARGV[8] empty             '1': the worker runs nothing, so the first sequence may pass the KV budget
-- ARGV[9] steal_ms          age from which an entry may be stolen
-- ARGV[10] prefix           of sequence hashes
-- ARGV[11] ttl              of claimed sequences and dead letters, seconds
-- ARGV[12] turn_ms          how long a worker may take to run empty for suspects, unless it asks again
-- ARGV[13] handed_back      '1': nothing but the handed back streams
-- ARGV[14] window           KV positions that a sequence takes at most, '0': as many as it says
-- ARGV[15] state            KV positions that a sequence takes besides, whatever its length
-- ARGV[16..]                ids of the last suspects that this worker was given
-- Returns {last generated ids of KEYS[1..8] and KEYS[11..], claims, ms until an entry that is too young may be stolen,
-- 0: none}; a claim is {stream, entry, id, spec, attempt, api, job, verdict} with verdict 'run', 'suspect', 'cancelled' or
-- 'deadline'. All are leased; the caller commits the end of the last two.
local group, worker = ARGV[1], ARGV[2]
local rows, batch_left, kv = tonumber(ARGV[3]), tonumber(ARGV[6]), tonumber(ARGV[7])
local empty, steal_ms, prefix, ttl = ARGV[8] == '1', tonumber(ARGV[9]), ARGV[10], ARGV[11]
local window, state = tonumber(ARGV[14]), tonumber(ARGV[15])
local now = server_ms()
local claims = {}
local running = 0
local there = {} -- numbers of KEYS that exist
local dry = {} -- streams in which nothing waits
local closed = false -- an entry did not fit into the KV budget: it and all behind it wait, so that it cannot starve

-- What to do with a waiting sequence: 'run', 'cancelled', 'deadline', or nil when there is nothing to run.
local function verdict_on(id)
  if not id or not is_hash(prefix .. id) then return nil end
  local h = redis.call('HMGET', prefix .. id, 'state', 'cancel', 'deadline', 'first', 'attempt')
  if h[1] ~= 'queued' then return nil end
  if h[2] then return 'cancelled' end
  local deadline, first = tonumber(h[3] or '0') or 0, tonumber(h[4] or '0') or 0
  if first > 0 and first <= now and h[5] == '0' then return 'deadline' end
  return (deadline > 0 and deadline <= now) and 'deadline' or 'run'
end

local function lease(stream, entry, id, verdict)
  local key = prefix .. id
  local attempt = count_up(key, 'attempt')
  redis.call('HSETNX', key, 'began', now)
  redis.call('HSET', key, 'state', 'running', 'worker', worker, 'stream', stream, 'entry', entry, 'started', now)
  redis.call('EXPIRE', key, ttl)
  local h = redis.call('HMGET', key, 'spec', 'api', 'job')
  claims[#claims + 1] = {stream, entry, id, h[1] or '', attempt, h[2] or '', h[3] or '', verdict}
end

local function discard(stream, entry, id)
  drop(stream, group, entry)
  if not id or not is_hash(prefix .. id) then
    dead_letter(KEYS[10], ttl, id or entry, 'no such sequence', worker, 0, '', stream, '')
  end
end

local function size_of_group(entries, i)
  local name, size = fields_of(entries[i]).group, 1
  if not name or name == '' then return 1 end
  while entries[i + size] and fields_of(entries[i + size]).group == name do size = size + 1 end
  return size
end

-- Of the entries ahead, how many to read now, and what to do with each. A group that the quota lets in is taken whole
-- when `limit` rows allow it, and left whole when fewer are left and it is not the first.
local function choose(entries, quota, limit, min_age)
  local verdicts, used, begun = {}, 0, nil
  for i, entry in ipairs(entries) do
    if now - tonumber(string.match(entry[1], '^%d+')) < min_age then break end
    local fields = fields_of(entry)
    local verdict = verdict_on(fields.id)
    if verdict == 'run' then
      local goes_on = begun and begun ~= '' and begun == fields.group
      local need = math.max(0, tonumber(fields.kv) or 0)
      if window > 0 then need = math.min(need, window) end
      need = need + state
      if used >= limit or (used >= quota and not goes_on) then break end
      if not goes_on and running > 0 and used + size_of_group(entries, i) > limit then break end
      if need > kv and not (empty and running == 0) then
        closed = true
        break
      end
      begun, used, running, kv = fields.group, used + 1, running + 1, kv - need
    end
    verdicts[i] = verdict or 'gone'
  end
  return verdicts, used
end

local function take(stream, quota, limit, min_age, label)
  if closed or quota <= 0 or limit <= 0 or dry[stream] then return 0 end
  local entries = undelivered(stream, group, limit + 16)
  dry[stream] = #entries == 0
  local verdicts, used = choose(entries, quota, limit, min_age)
  if #verdicts == 0 then return 0 end
  redis.call('XREADGROUP', 'GROUP', group, worker, 'COUNT', #verdicts, 'STREAMS', stream, '>')
  for i, verdict in ipairs(verdicts) do
    local entry, id = entries[i][1], fields_of(entries[i]).id
    if verdict == 'gone' then discard(stream, entry, id)
    else lease(stream, entry, id, verdict == 'run' and label or verdict) end
  end
  return used
end

local function interactive(first, last, quota)
  for i = first, last do
    local used = take(KEYS[i], quota, rows, 0, 'run')
    quota, rows = quota - used, rows - used
  end
end

local function batch(first, last, quota)
  for i = first, last do
    local used = take(KEYS[i], quota, math.min(rows, batch_left), 0, 'run')
    quota, rows, batch_left = quota - used, rows - used, batch_left - used
  end
end

-- Most workers have no stream of their own, and there may be many workers: one question settles it for all.
local function others_have_any()
  return #KEYS > 10 and redis.call('EXISTS', unpack(KEYS, 11)) > 0
end

local function tips()
  local ids, look_at_others = {}, others_have_any()
  for i = 1, #KEYS do
    if i < 9 or i > 10 then
      ids[#ids + 1] = '0-0'
      there[i] = (i < 9 or look_at_others) and redis.call('EXISTS', KEYS[i]) == 1
      if there[i] then
        local info = redis.call('XINFO', 'STREAM', KEYS[i])
        for j = 1, #info, 2 do if info[j] == 'last-generated-id' then ids[#ids] = info[j + 1] end end
      end
    end
  end
  return ids
end

local function runs_suspects()
  for i = 16, #ARGV do
    local h = redis.call('HMGET', prefix .. ARGV[i], 'state', 'worker')
    if h[1] == 'running' and h[2] == worker then return true end
  end
  return false
end

-- How many sequences the first party of a stream has; what has ended meanwhile does not count.
local function size_of_party(stream)
  local size, first = 0, nil
  for _, entry in ipairs(undelivered(stream, group, rows)) do
    local id = fields_of(entry).id
    if verdict_on(id) == 'run' then
      local party = redis.call('HGET', prefix .. id, 'party') or entry[1]
      first = first or party
      if party ~= first then break end
      size = size + 1
    end
  end
  return math.max(1, size)
end

local function take_party(stream)
  local size = size_of_party(stream)
  local used = take(stream, size, size, 0, 'suspect')
  for _, claim in ipairs(claims) do
    if claim[8] == 'suspect' then redis.call('HSET', prefix .. claim[3], 'beside', used - 1) end
  end
  return used
end

-- Give a waiting party to this worker if it is empty. If not, one worker at a time runs empty for it.
local function suspects()
  if #undelivered(KEYS[4], group, 1) + #undelivered(KEYS[8], group, 1) == 0 then return false end
  if empty then
    if rows > 0 and take_party(KEYS[4]) == 0 then take_party(KEYS[8]) end
    if redis.call('GET', KEYS[9]) == worker then redis.call('DEL', KEYS[9]) end
    return running > 0
  end
  redis.call('SET', KEYS[9], worker, 'NX', 'PX', ARGV[12])
  if redis.call('GET', KEYS[9]) ~= worker then return false end
  redis.call('PEXPIRE', KEYS[9], ARGV[12])
  return true
end

local ids = tips()
if runs_suspects() then return {ids, claims, 0} end
if ARGV[13] == '1' then
  interactive(2, 2, rows)
  batch(6, 6, batch_left)
  return {ids, claims, 0}
end
if suspects() then return {ids, claims, 0} end
interactive(1, 3, tonumber(ARGV[4]))
batch(5, 7, tonumber(ARGV[5]))
interactive(1, 3, rows)
batch(5, 7, batch_left)
local look_again = 0
for i = 11, #KEYS do
  local first = there[i] and undelivered(KEYS[i], group, 1)[1]
  if first then
    local is_batch = i % 2 == 0
    local limit = is_batch and math.min(rows, batch_left) or rows
    local used = take(KEYS[i], limit, limit, steal_ms, 'run')
    rows = rows - used
    if is_batch then batch_left = batch_left - used end
    local left = undelivered(KEYS[i], group, 1)[1]
    local ms = left and tonumber(string.match(left[1], '^%d+')) + steal_ms - now or 0
    if ms > 0 then look_again = look_again > 0 and math.min(look_again, ms) or ms end
  end
end
return {ids, claims, look_again}
