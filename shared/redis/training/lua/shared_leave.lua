-- A leader ends.
-- KEYS[1] run   ARGV[1] epoch, ARGV[2] '1': the run is done, ARGV[3] how long that is told, in seconds
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
if ARGV[2] == '1' then
  redis.call('HSET', KEYS[1], 'ended', '1')
  redis.call('EXPIRE', KEYS[1], ARGV[3])
else
  redis.call('DEL', KEYS[1])
end
return 1
