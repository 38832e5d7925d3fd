-- Write down that a version failed its gate; it stays readable and can never become the latest.
-- KEYS[1] head hash   KEYS[2] manifest
-- ARGV[1] version   ARGV[2] manifest JSON with the status   ARGV[3] event channel   ARGV[4] event JSON
-- Returns ok, unknown or latest (it is already served).
if redis.call('EXISTS', KEYS[2]) == 0 then return 'unknown' end
if redis.call('HGET', KEYS[1], 'latest') == ARGV[1] then return 'latest' end
redis.call('SET', KEYS[2], ARGV[2], 'KEEPTTL')
redis.call('PUBLISH', ARGV[3], ARGV[4])
return 'ok'
