-- Say when entries are due.
-- uses: clock
-- KEYS[1] sorted set   ARGV[1] NX: only new ones, XX: only those that are there   ARGV[2] milliseconds from now
-- ARGV[3] time to live, seconds   ARGV[4...] entries
local at = string.format('%d', tonumber(now_ms()) + ARGV[2])
for i = 4, #ARGV do redis.call('ZADD', KEYS[1], ARGV[1], at, ARGV[i]) end
redis.call('EXPIRE', KEYS[1], ARGV[3])
