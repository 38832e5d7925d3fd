-- Forget an idempotency key whose job is gone, unless it has been taken again meanwhile.
-- KEYS[1] idempotency key
-- ARGV[1] the job that is gone
-- Returns 1 when the key was deleted, else 0.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
