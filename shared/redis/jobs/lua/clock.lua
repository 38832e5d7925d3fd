-- Redis' clock; client.py puts this in front of every script that says `-- uses: clock`.
local function now_ms()
  local now = redis.call('TIME')
  return string.format('%d', now[1] * 1000 + math.floor(now[2] / 1000))
end
