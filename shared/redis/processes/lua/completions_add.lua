-- Keep what sequences have written behind a prompt. May be repeated: what is there already is not added again.
-- uses: clock
-- KEYS[1] the prompt's completions   KEYS[2] uses   KEYS[3] sizes   (keys of prompts that are let go share their slot)
-- ARGV[1] what the keys of prompts begin with   ARGV[2] the prompt   ARGV[3] ttl, seconds   ARGV[4] bound of all, bytes
-- ARGV[5] bound of one prompt, bytes   ARGV[6] most completions of one prompt   ARGV[7...] completions, the latest last
local LOOKED_AT = 256 -- prompts that one call may let go
local PROMPT, COMPLETION = 256, 32 -- bytes that each takes besides

local function known(field) return tonumber(redis.call('HGET', KEYS[3], field) or '') or 0 end

local all = known('all')

local function forget(prompt)
  redis.call('UNLINK', ARGV[1] .. prompt)
  redis.call('ZREM', KEYS[2], prompt)
  all = all - known(prompt)
  redis.call('HDEL', KEYS[3], prompt)
end

local type_of = redis.call('TYPE', KEYS[1]).ok
if type_of ~= 'list' then forget(ARGV[2]) end -- its time is over, or somebody else has written there
local before = known(ARGV[2])
local size = math.max(before, PROMPT)
for at = 7, #ARGV do
  if not redis.call('LPOS', KEYS[1], ARGV[at]) then
    redis.call('RPUSH', KEYS[1], ARGV[at])
    size = size + #ARGV[at] + COMPLETION
  end
end
while redis.call('LLEN', KEYS[1]) > tonumber(ARGV[6]) or size > tonumber(ARGV[5]) do
  local oldest = redis.call('LPOP', KEYS[1])
  if not oldest then break end
  size = size - #oldest - COMPLETION
end
all = all + size - before
redis.call('HSET', KEYS[3], ARGV[2], size)
redis.call('ZADD', KEYS[2], now_ms(), ARGV[2])
local old = string.format('(%d', now_ms() - 1000 * tonumber(ARGV[3]))
for _, prompt in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', old, 'LIMIT', 0, LOOKED_AT)) do forget(prompt) end
if all > tonumber(ARGV[4]) then
  for _, prompt in ipairs(redis.call('ZRANGE', KEYS[2], 0, LOOKED_AT - 1)) do
    if all <= tonumber(ARGV[4]) then break end
    forget(prompt)
  end
end
redis.call('HSET', KEYS[3], 'all', math.max(0, all))
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[3] + 86400)
redis.call('EXPIRE', KEYS[3], ARGV[3] + 86400)
return 1
