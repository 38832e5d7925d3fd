-- Note that a request is being carried out, before it may end its service.
-- KEYS[1] learner   ARGV[1] epoch   ARGV[2] number of the request, or '' when it has come to an end
-- Returns how often it was begun and came to no end, this time included; 0 when another service has the learner.
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], 'trying', 'tries')
  return 1
end
if redis.call('HGET', KEYS[1], 'trying') ~= ARGV[2] then
  redis.call('HSET', KEYS[1], 'trying', ARGV[2], 'tries', 0)
end
return redis.call('HINCRBY', KEYS[1], 'tries', 1)
