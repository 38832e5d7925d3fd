-- How much waits and runs in some streams.
-- uses: streams
--
-- KEYS             the streams
-- ARGV[1] group
-- Returns {waiting, leased, age in ms of the oldest waiting entry}.
local waiting, leased, oldest = 0, 0, 0
local now = server_ms()
for _, stream in ipairs(KEYS) do
  local _, pending = group_of(stream, ARGV[1])
  if pending then
    leased = leased + pending
    waiting = waiting + redis.call('XLEN', stream) - pending
    local first = undelivered(stream, ARGV[1], 1)[1]
    if first then oldest = math.max(oldest, now - tonumber(string.match(first[1], '^%d+'))) end
  end
end
return {waiting, leased, oldest}
