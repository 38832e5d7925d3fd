-- Functions on sequence streams; client.py puts them in front of every script that says `-- uses: streams`.
--
-- An entry holds id, group and kv of a sequence; everything else stands in the sequence's hash, which is the truth about
-- who may run it: its fields state, worker and attempt change together with the entry's place, in one Lua call.

local function server_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

-- A stream with its consumer group, and its time to live refreshed.
local function open_stream(stream, group, ttl)
  if redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
  end
  redis.call('EXPIRE', stream, ttl)
end

-- The group's last delivered id and its number of leased entries; nil when there is no such stream. A group that is
-- missing (a stream older than the last loss of data) is made again.
local function group_of(stream, group)
  if redis.call('EXISTS', stream) == 0 then return nil end
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local info = {}
    for i = 1, #flat, 2 do info[flat[i]] = flat[i + 1] end
    if info.name == group then return info['last-delivered-id'], info.pending end
  end
  redis.call('XGROUP', 'CREATE', stream, group, '0')
  return '0-0', 0
end

-- The next entries that nobody has: {{entry id, {field, value, ...}}, ...}.
local function undelivered(stream, group, count)
  local last = group_of(stream, group)
  if not last then return {} end
  return redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', count)
end

local function fields_of(entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return fields
end

-- Whether a key is a hash; a message may name anything.
local function is_hash(key) return redis.call('TYPE', key).ok == 'hash' end

-- A counter's next value; one that is no number begins again.
local function count_up(key, field)
  local value = redis.pcall('HINCRBY', key, field, 1)
  if type(value) == 'number' then return value end
  redis.call('HSET', key, field, 1)
  return 1
end

local function drop(stream, group, entry)
  redis.call('XACK', stream, group, entry)
  redis.call('XDEL', stream, entry)
end

-- Move an entry to the end of another stream, where anybody may claim it.
local function move(stream, group, entry, target, seq_prefix, ttl)
  drop(stream, group, entry[1])
  local id = fields_of(entry).id
  if not id or not is_hash(seq_prefix .. id) then return end
  open_stream(target, group, ttl)
  local moved = redis.call('XADD', target, '*', unpack(entry[2]))
  redis.call('HSET', seq_prefix .. id, 'state', 'queued', 'worker', '', 'stream', target, 'entry', moved)
end

-- Suspects: sequences that may have ended their workers. Those of one worker run in two halves, each a party that has a
-- worker for itself; a half that ends its worker, too, is divided again. So with n of them the guilty one is alone after
-- log2(n) more deaths, and no other one is given up because of it.

-- Whether a sequence is to be given up: it has had its deaths, the last one when it ran alone.
local function is_poison(key, deaths, max_deaths)
  return deaths >= max_deaths and redis.call('HGET', key, 'beside') == '0'
end

-- Move suspects of one worker, each {stream, entry}, to the end of `target` as two parties of that name.
local function divide(suspects, name, group, target, seq_prefix, ttl)
  for i, each in ipairs(suspects) do
    local half = i <= math.ceil(#suspects / 2) and 'a' or 'b'
    move(each[1], group, each[2], target, seq_prefix, ttl)
    redis.call('HSET', seq_prefix .. fields_of(each[2]).id, 'party', name .. '/' .. half)
  end
end
