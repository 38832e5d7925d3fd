-- What becomes of entries that some process owns; of one that is another's now, nothing.
-- uses: clock due
-- KEYS[2]: a "!" behind the owner: due as soon as it is given back
-- ARGV[1] renew, again (give back), done, drop (whoever owns it)   ARGV[2] milliseconds from now   ARGV[3] ttl, seconds
-- ARGV[4] owner   ARGV[5...] entries
local now, moved = tonumber(now_ms()), {}
for i = 5, #ARGV do
  local entry, owner = ARGV[i], redis.call('HGET', KEYS[2], ARGV[i])
  local hastened = owner == ARGV[4] .. '!'
  if ARGV[1] == 'drop' or owner == ARGV[4] or hastened then
    local who = whose(entry)
    moved[who] = true
    if ARGV[1] ~= 'renew' then redis.call('HDEL', KEYS[2], entry) end
    if ARGV[1] == 'done' or ARGV[1] == 'drop' then
      redis.call('ZREM', list_of(who), entry)
      redis.call('HDEL', KEYS[3], entry)
    else
      local at = (ARGV[1] == 'again' and hastened) and now or now + ARGV[2]
      redis.call('ZADD', list_of(who), 'XX', string.format('%d', at), entry)
    end
  end
end
for who in pairs(moved) do settle(who, now, ARGV[3]) end
