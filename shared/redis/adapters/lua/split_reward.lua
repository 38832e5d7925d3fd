-- Count the reward of an answer, once: count, mean and squared differences of its version.
-- KEYS[1] the split   KEYS[2] answers whose reward it has
-- ARGV[1] id of the split   ARGV[2] version   ARGV[3] id of the answer   ARGV[4] reward   ARGV[5] time to live, seconds
-- Returns 1; 0 when it has been counted, when there is another split by now, when this one has ended, or when it has
-- all rewards that it takes.
local id, most, all, verdict, moved = unpack(redis.call('HMGET', KEYS[1], 'id', 'most', 'all', 'verdict', 'moved'))
if id ~= ARGV[1] or verdict or moved or tonumber(all or '0') >= tonumber(most) then return 0 end
if redis.call('SADD', KEYS[2], ARGV[3]) == 0 then return 0 end
local version, reward = ARGV[2], tonumber(ARGV[4])
local earned = redis.call('HMGET', KEYS[1], 'mean:' .. version, 'squares:' .. version)
local mean, squares = tonumber(earned[1] or '0'), tonumber(earned[2] or '0')
local count = redis.call('HINCRBY', KEYS[1], 'count:' .. version, 1)
local apart = reward - mean
mean = mean + apart / count
squares = squares + apart * (reward - mean)
redis.call('HINCRBY', KEYS[1], 'all', 1)
redis.call('HSET', KEYS[1], 'mean:' .. version, string.format('%.17g', mean),
  'squares:' .. version, string.format('%.17g', squares))
for i = 1, 2 do redis.call('EXPIRE', KEYS[i], ARGV[5]) end
return 1
