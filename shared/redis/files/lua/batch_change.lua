-- Set fields of a batch; one that has ended is left as it is.
-- KEYS[1] batch hash   ARGV[1] time to live, seconds   ARGV[2...] field, value
-- Returns 1, or 0 when the batch has ended or is unknown.
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'validating' and state ~= 'in_progress' then return 0 end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
