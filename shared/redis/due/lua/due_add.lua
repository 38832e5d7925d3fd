-- Add an entry; one that is there keeps its time.
-- uses: clock
-- KEYS[1] entries by time   KEYS[2] their owners   ARGV[1] entry   ARGV[2] milliseconds from now   ARGV[3] ttl, seconds
redis.call('ZADD', KEYS[1], 'NX', string.format('%d', tonumber(now_ms()) + ARGV[2]), ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[3])
