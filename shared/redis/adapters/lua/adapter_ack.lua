-- Write down which version a worker has loaded, and renew that version's time to live.
-- KEYS[1] acks   KEYS[2...] keys whose time to live the use renews
-- ARGV[1] worker   ARGV[2] version   ARGV[3] time to live, seconds   ARGV[4] age at which a worker's entry goes, ms
local now = redis.call('TIME')
local at_ms = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. string.format('%.0f', at_ms))
if redis.call('HLEN', KEYS[1]) > 64 then
  local all = redis.call('HGETALL', KEYS[1])
  for i = 1, #all, 2 do
    local then_ms = tonumber(string.match(all[i + 1], ' (%d+)$') or '0')
    if at_ms - then_ms > tonumber(ARGV[4]) then redis.call('HDEL', KEYS[1], all[i]) end
  end
end
for i = 1, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[3]) end
return 1
