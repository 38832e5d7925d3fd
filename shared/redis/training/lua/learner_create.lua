-- Make a learner; one that is there stays what it is.
-- KEYS[1] learner   ARGV[1] spec   ARGV[2] ttl, seconds
-- Returns its spec.
redis.call('HSETNX', KEYS[1], 'spec', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('HGET', KEYS[1], 'spec')
