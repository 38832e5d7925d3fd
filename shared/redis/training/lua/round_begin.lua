-- The first run of a federation says what it is and where it begins; the others join.
-- KEYS[1] rounds, KEYS[2] bytes of the first weights   ARGV[1] spec, ARGV[2] state, ARGV[3] ttl in seconds
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'spec', ARGV[1], 'round', 0, 'state', ARGV[2], 'taken', '')
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
