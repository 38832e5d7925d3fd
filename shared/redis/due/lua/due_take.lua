-- Take entries that are due: they are due again when the lease is over. Those who have some take turns, one entry each.
-- uses: clock due
-- ARGV[1] most   ARGV[2] lease, milliseconds   ARGV[3] ttl, seconds   ARGV[4] owner   ARGV[5...] who is passed over
-- Returns whose and entry, in turns.
local now, most, ttl = tonumber(now_ms()), tonumber(ARGV[1]), ARGV[3]
local passed_over, some, taken = {}, {}, {}
for i = 5, #ARGV do passed_over[ARGV[i]] = true end
settle('', now, ttl) -- processes of a version that knows no turns may have changed these
for _, who in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now + HALF, 'LIMIT', 0, most + #ARGV - 4)) do
  local due = redis.call('ZRANGEBYSCORE', list_of(who), '-inf', now, 'LIMIT', 0, most)
  if #due == 0 then settle(who, now, ttl) elseif not passed_over[who] then some[#some + 1] = {who, due} end
end
local function take(who, entry)
  redis.call('ZADD', list_of(who), string.format('%d', now + ARGV[2]), entry)
  redis.call('HSET', KEYS[2], entry, ARGV[4])
  taken[#taken + 1] = who
  taken[#taken + 1] = entry
end
for round = 1, most do
  for _, each in ipairs(some) do
    if each[2][round] and #taken < 2 * most then take(each[1], each[2][round]) end
  end
end
for at, each in ipairs(some) do
  if at <= most then settle(each[1], now, ttl, true) end
end
return taken
