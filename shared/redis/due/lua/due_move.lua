-- What becomes of entries that somebody owns; of one that is another's now, nothing.
-- uses: clock
-- KEYS[1] entries by time   KEYS[2] their owners; a "!" behind the owner: due as soon as it is given back
-- ARGV[1] renew, again (give back), done, drop (whoever owns it)   ARGV[2] milliseconds from now   ARGV[3] ttl, seconds
-- ARGV[4] owner   ARGV[5...] entries
local now = tonumber(now_ms())
for i = 5, #ARGV do
  local entry, owner = ARGV[i], redis.call('HGET', KEYS[2], ARGV[i])
  local hastened = owner == ARGV[4] .. '!'
  if ARGV[1] == 'drop' or owner == ARGV[4] or hastened then
    if ARGV[1] ~= 'renew' then redis.call('HDEL', KEYS[2], entry) end
    if ARGV[1] == 'done' or ARGV[1] == 'drop' then
      redis.call('ZREM', KEYS[1], entry)
    else
      local at = (ARGV[1] == 'again' and hastened) and now or now + ARGV[2]
      redis.call('ZADD', KEYS[1], 'XX', string.format('%d', at), entry)
    end
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[3])
