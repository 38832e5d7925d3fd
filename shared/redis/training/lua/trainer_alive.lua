-- Own a policy for a while: take it when nobody has it, or when a dead owner has it; renew or give back one's own.
-- uses: policy_owner
--
-- KEYS[1] the alive key   KEYS[2] the policy's adapter   KEYS[3] what its trainer tells
-- ARGV[1] owner   ARGV[2] seconds; 0 gives it back   ARGV[3] an owner that is known to be dead ('' none)
-- ARGV[4] the tenant that a new policy belongs to, or ''   ARGV[5] '1': refuse a policy of anybody else
-- ARGV[6] time to live of KEYS[3], seconds
-- Returns the owner from now on; '' nobody; nil: refused.
local holder = redis.call('GET', KEYS[1])
local mine = holder == ARGV[1]
if ARGV[2] == '0' then
  if mine then redis.call('DEL', KEYS[1]) end
  if mine and redis.call('HLEN', KEYS[3]) == 1 then redis.call('HDEL', KEYS[3], 'tenant') end  -- it has told nothing
  return mine and '' or holder or ''
end
local tenant = policy_owner(KEYS[2], KEYS[3])
if ARGV[5] == '1' and tenant and tenant ~= ARGV[4] then return nil end
if holder and not mine and holder ~= ARGV[3] then return holder end
tenant = tenant or ARGV[4]
if tenant ~= '' and redis.call('HGET', KEYS[3], 'tenant') ~= tenant then
  redis.call('HSET', KEYS[3], 'tenant', tenant)
  redis.call('EXPIRE', KEYS[3], ARGV[6])
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return ARGV[1]
