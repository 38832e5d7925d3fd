-- Move the cursor over a job's inputs; it only goes forward.
-- uses: clock
-- KEYS[1] job hash
-- ARGV[1] prompts that have been expanded into sequences
-- Returns the cursor.
local at = tonumber(redis.call('HGET', KEYS[1], 'expanded') or '0')
if tonumber(ARGV[1]) <= at then return at end
redis.call('HSET', KEYS[1], 'expanded', ARGV[1], 'progress_ms', now_ms())
return tonumber(ARGV[1])
