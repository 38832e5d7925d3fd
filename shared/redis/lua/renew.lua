-- Renew the leases of one worker's entries on one stream, after checking that it still owns them.
--
-- KEYS[1] stream  ARGV[1] group  ARGV[2] worker  ARGV[3..] entries
-- Returns the entries that are no longer this worker's.
local lost = {}
for i = 3, #ARGV do
  local p = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1, ARGV[2])
  if p.err or #p == 0 then
    lost[#lost + 1] = ARGV[i]
  else
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'JUSTID')
  end
end
return lost
