-- Functions on a list of what is due; client.py puts them in front of every script that says `-- uses: due`.
--
-- KEYS of these scripts: [1] entries of nobody in particular, by time   [2] which process has taken which entry
-- [3] whose an entry is   [4] turns: whose entries are taken next, by the time since which they wait for that
-- Somebody's entries stand in a list of their own, so that what is taken does not depend on how many others have.

local function list_of(who)
  return who == '' and KEYS[1] or KEYS[1] .. ':of:' .. who
end

local function whose(entry)
  return redis.call('HGET', KEYS[3], entry) or ''
end

-- A turn that was had in this millisecond comes after those of who became due in it, and may be followed by another one.
local HALF = 0.5

-- Somebody's next turn: when the first entry is due. Who waits for a turn keeps its place, but for who has `had` one now.
local function settle(who, now, ttl, had)
  local first = tonumber(redis.call('ZRANGE', list_of(who), 0, 0, 'WITHSCORES')[2])
  if not first then
    redis.call('ZREM', KEYS[4], who)
    return
  end
  local turn = had and now + HALF or tonumber(redis.call('ZSCORE', KEYS[4], who) or first)
  if turn > now + HALF then turn = first end
  redis.call('ZADD', KEYS[4], string.format('%.1f', math.max(first, turn)), who)
  redis.call('EXPIRE', list_of(who), ttl)
  for i = 2, 4 do redis.call('EXPIRE', KEYS[i], ttl) end
end
