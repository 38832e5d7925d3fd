-- Own a policy for a while: take it when nobody has it, or when a dead owner has it; renew or give back one's own.
-- KEYS[1] the alive key
-- ARGV[1] owner   ARGV[2] seconds; 0 gives it back   ARGV[3] an owner that is known to be dead ('' none)
-- Returns the owner from now on; '' nobody.
local holder = redis.call('GET', KEYS[1])
local mine = holder == ARGV[1]
if ARGV[2] == '0' then
  if mine then redis.call('DEL', KEYS[1]) end
  return mine and '' or holder or ''
end
if holder and not mine and holder ~= ARGV[3] then return holder end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return ARGV[1]
