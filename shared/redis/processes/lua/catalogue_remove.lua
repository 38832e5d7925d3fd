-- Take a model out of the catalogue, with all that is known of it. May be repeated.
--
-- KEYS[1] entries   KEYS[2] aliases   KEYS[3] figures   KEYS[4] loads   KEYS[5] orders
-- ARGV[1] name      ARGV[2] what the fields of its orders end with
-- Returns 1 if it was there.
local aliases = redis.call('HGETALL', KEYS[2])
for i = 1, #aliases, 2 do
  if aliases[i + 1] == ARGV[1] then redis.call('HDEL', KEYS[2], aliases[i]) end
end
for _, field in ipairs(redis.call('HKEYS', KEYS[5])) do
  if string.sub(field, -#ARGV[2]) == ARGV[2] then redis.call('HDEL', KEYS[5], field) end
end
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('HDEL', KEYS[4], ARGV[1])
return redis.call('HDEL', KEYS[1], ARGV[1])
