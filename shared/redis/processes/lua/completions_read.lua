-- What sequences have written behind each of some prompts, the latest last; these prompts count as used now.
-- uses: clock
-- KEYS[1] uses   KEYS[2...] completions of each prompt   ARGV[1] ttl, seconds   ARGV[2...] the prompts
local found = {}
for at = 2, #KEYS do
  local completions = redis.pcall('LRANGE', KEYS[at], 0, -1)
  found[#found + 1] = completions.err and {} or completions
  if #found[#found] > 0 then
    redis.call('EXPIRE', KEYS[at], ARGV[1])
    redis.call('ZADD', KEYS[1], 'XX', now_ms(), ARGV[at])
  end
end
return found
