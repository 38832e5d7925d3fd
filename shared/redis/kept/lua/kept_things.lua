-- What a keeper has, within a bound of bytes; in front of every script that says `-- uses: clock kept_things`.
-- All keys of a keeper share a slot and begin with `prefix`.

local LOOKED_AT = 256 -- things that one call may let go

local function runs(prefix, id)
  local state = redis.call('HGET', prefix .. 'thing:' .. id, 'state')
  return state == 'queued' or state == 'in_progress'
end

local function forget(prefix, id)
  local uses, sizes = prefix .. 'uses', prefix .. 'sizes'
  redis.call('UNLINK', prefix .. 'thing:' .. id, prefix .. 'order:' .. id, prefix .. 'events:' .. id)
  redis.call('ZREM', uses, id)
  for _, order in ipairs({'waiting', 'judged', 'sessions'}) do redis.call('ZREM', prefix .. 'order:' .. order, id) end
  redis.call('HINCRBY', sizes, 'all', -(tonumber(redis.call('HGET', sizes, id) or '0')))
  redis.call('HDEL', sizes, id)
end

local function use(prefix, id, ttl)
  redis.call('ZADD', prefix .. 'uses', now_ms(), id)
  redis.call('EXPIRE', prefix .. 'thing:' .. id, ttl)
  redis.call('EXPIRE', prefix .. 'order:' .. id, ttl)
end

-- A thing has become so large: count it, and let go what is too old or too much.
local function weigh(prefix, id, size, ttl, bound)
  local uses, sizes = prefix .. 'uses', prefix .. 'sizes'
  local before = tonumber(redis.call('HGET', sizes, id) or '0')
  redis.call('HSET', sizes, id, size)
  local all = redis.call('HINCRBY', sizes, 'all', size - before)
  use(prefix, id, ttl)
  local old = string.format('%d', now_ms() - 1000 * ttl)
  for _, each in ipairs(redis.call('ZRANGEBYSCORE', uses, '-inf', '(' .. old, 'LIMIT', 0, LOOKED_AT)) do
    forget(prefix, each)
  end
  if all > bound then
    for _, each in ipairs(redis.call('ZRANGE', uses, 0, LOOKED_AT - 1)) do
      if tonumber(redis.call('HGET', sizes, 'all')) <= bound then break end
      if each ~= id and not runs(prefix, each) then forget(prefix, each) end
    end
  end
  redis.call('EXPIRE', uses, ttl + 86400)
  redis.call('EXPIRE', sizes, ttl + 86400)
end
