-- Write down the verdict of a split that moves nothing, unless it has ended.
-- KEYS[1] the split   KEYS[2] answers whose reward it has   ARGV[1] id of the split   ARGV[2] verdict, JSON
-- Returns whether it has been written.
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end
if redis.call('HEXISTS', KEYS[1], 'moved') == 1 then return 0 end
if redis.call('HSETNX', KEYS[1], 'verdict', ARGV[2]) == 0 then return 0 end
redis.call('UNLINK', KEYS[2])
return 1
