-- How a sequence ends, once; client.py puts this in front of every script that says `-- uses: ending`.

-- `log` and `finished` are keys; `tail` is the log's last chunk ('' none). With a job the result goes to its finished
-- stream; a log that nobody streams is dropped.
local function finish(seq, log, finished, id, state, result, tail, ttl, job_ttl, has_job, unread)
  redis.call('HSET', seq, 'state', state, 'finished', redis.call('TIME')[1])
  redis.call('HDEL', seq, 'spec')
  redis.call('EXPIRE', seq, ttl)
  if unread then
    redis.call('DEL', log)
  else
    if tail ~= '' then redis.call('XADD', log, '*', 'd', tail) end
    redis.call('EXPIRE', log, ttl)
  end
  if has_job then
    redis.call('XADD', finished, '*', 'id', id, 'result', result)
    redis.call('EXPIRE', finished, job_ttl)
  end
end

local function has_ended(state) return state == 'done' or state == 'cancelled' end

-- A settled sequence of live traffic goes, with its spec, to those who make trajectories of them (uses bounded.lua).
-- Called before `finish`, which forgets the spec.
local function collect(stream, stats, seq, id, result, max_entries, max_bytes, ttl, group)
  local spec = redis.call('HGET', seq, 'spec') or ''
  append_bounded(stream, stats, group, ttl, tonumber(max_entries), tonumber(max_bytes), #spec + #result,
    {'id', id, 'spec', spec, 'result', result})
end

-- Store the spec and the result of a sequence for `ttl` seconds, so that it can be replayed. `index` orders recordings by
-- time, as "<bytes> <id>"; the oldest go when all together have more than `most` bytes, which `stats` counts. Called
-- before `finish`.
local function record(recording, index, stats, seq, id, result, ttl, most)
  local spec = redis.call('HGET', seq, 'spec') or ''
  local now, prefix = redis.call('TIME'), string.sub(recording, 1, #recording - #id)
  redis.call('HSET', recording, 'spec', spec, 'result', result)
  redis.call('EXPIRE', recording, ttl)
  redis.call('ZADD', index, now[1] * 1000 + math.floor(now[2] / 1000), (#spec + #result) .. ' ' .. id)
  local bytes = redis.call('HINCRBY', stats, 'bytes', #spec + #result)
  while bytes > most and redis.call('ZCARD', index) > 1 do
    local size, oldest = string.match(redis.call('ZPOPMIN', index)[1], '^(%d+) (.*)$')
    redis.call('DEL', prefix .. oldest)
    bytes = redis.call('HINCRBY', stats, 'bytes', -size)
  end
  if redis.call('TTL', index) < ttl then
    redis.call('EXPIRE', index, ttl)
    redis.call('EXPIRE', stats, ttl)
  end
end
