-- Everything about the models of a ring. Hosts that have gone are forgotten on the way.
-- uses: clock
--
-- KEYS[1] entries   KEYS[2] figures   KEYS[3] orders   KEYS[4] loads   KEYS[5] host ids
-- (heartbeats and load leases share their slot)
-- ARGV[1] what keys of heartbeats begin with   ARGV[2] what keys of load leases begin with
-- Returns {Unix ms, entries, figures, orders, loads: {field, value, ...}, heartbeats, leases: {model, host id, ...}}.
local beats = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[5], 0, -1)) do
  local beat = redis.call('GET', ARGV[1] .. id)
  if beat then beats[#beats + 1] = beat
  else redis.call('ZREM', KEYS[5], id) end
end
local leases = {}
local entries = redis.call('HGETALL', KEYS[1])
for i = 1, #entries, 2 do
  local host = entries[i] ~= '' and redis.call('GET', ARGV[2] .. entries[i])
  if host then
    leases[#leases + 1] = entries[i]
    leases[#leases + 1] = host
  end
end
local figures, orders = redis.call('HGETALL', KEYS[2]), redis.call('HGETALL', KEYS[3])
return {now_ms(), entries, figures, orders, redis.call('HGETALL', KEYS[4]), beats, leases}
