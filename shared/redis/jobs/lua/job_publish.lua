-- Make a completely written job visible.
-- uses: clock
-- KEYS[1] job hash   KEYS[2] its inputs   KEYS[3] its images
-- ARGV[1] time to live of the job, seconds
-- Returns 1 when this call made it visible, 2 when it already was, 0 when there is no complete job.
local job = redis.call('HMGET', KEYS[1], 'state', 'written')
if job[1] then return 2 end
if not job[2] then return 0 end
redis.call('HSET', KEYS[1], 'state', 'queued', 'created_ms', now_ms())
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[1])
redis.call('EXPIRE', KEYS[3], ARGV[1])
return 1
