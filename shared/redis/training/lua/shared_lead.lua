-- A leader begins, or goes on leading; one that another has followed is refused.
-- KEYS[1] run   ARGV[1] epoch, ARGV[2] spec, ARGV[3] ttl in seconds, ARGV[4] '1': begin
-- Returns 1, or 0 when another leads.
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch and epoch ~= ARGV[1] and ARGV[4] ~= '1' then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'spec', ARGV[2])
redis.call('HDEL', KEYS[1], 'ended')
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
