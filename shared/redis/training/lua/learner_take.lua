-- Own a learner from now on; what its former owners say does not count any more.
-- KEYS[1] learner   KEYS[2] its requests   ARGV[1] ttl, seconds
-- Returns the epoch, spec, done, applied, state; nothing when there is no such learner.
if redis.call('HEXISTS', KEYS[1], 'spec') == 0 then return {} end
redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[1])
return redis.call('HMGET', KEYS[1], 'epoch', 'spec', 'done', 'applied', 'state')
