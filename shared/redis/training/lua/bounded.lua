-- Functions on streams with bounds; client.py puts them in front of every script that says `-- uses: bounded`.
--
-- Every entry has its size in a field of that name; `stats` holds added, dropped, consumed, and the bytes that wait.

local function forget_entry(stream, stats, group, entry)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'size' then redis.call('HINCRBY', stats, 'bytes', -tonumber(entry[2][i + 1])) end
  end
  redis.call('XACK', stream, group, entry[1])
  redis.call('XDEL', stream, entry[1])
end

-- Append; beyond the bounds the oldest go, and are counted. The newest one stays, whatever its size.
local function append_bounded(stream, stats, group, ttl, max_entries, max_bytes, size, fields)
  if redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
    redis.call('HSET', stats, 'bytes', 0)
  end
  fields[#fields + 1] = 'size'
  fields[#fields + 1] = size
  redis.call('XADD', stream, '*', unpack(fields))
  redis.call('HINCRBY', stats, 'added', 1)
  local bytes = redis.call('HINCRBY', stats, 'bytes', size)
  local length = redis.call('XLEN', stream)
  while length > 1 and (length > max_entries or bytes > max_bytes) do
    forget_entry(stream, stats, group, redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1])
    redis.call('HINCRBY', stats, 'dropped', 1)
    bytes = tonumber(redis.call('HGET', stats, 'bytes'))
    length = length - 1
  end
  redis.call('EXPIRE', stream, ttl)
  redis.call('EXPIRE', stats, ttl)
end
