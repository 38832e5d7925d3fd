-- Entries of a bounded stream have been dealt with; said again it changes nothing.
-- uses: bounded
--
-- KEYS[1] stream   KEYS[2] its stats
-- ARGV[1] group    ARGV[2..] entry ids
-- Returns how many were there.
local found = 0
for i = 2, #ARGV do
  local entry = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])[1]
  if entry then
    forget_entry(KEYS[1], KEYS[2], ARGV[1], entry)
    found = found + 1
  else
    redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  end
end
if found > 0 then
  redis.call('HINCRBY', KEYS[2], 'consumed', found)
  redis.call('EXPIRE', KEYS[2], 604800, 'NX') -- had it expired just now, what we made goes, too
end
return found
