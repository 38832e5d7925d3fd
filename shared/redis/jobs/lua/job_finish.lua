-- End a job, once: a terminal state is never left. Samples without a result count under `rest`.
-- uses: clock
-- KEYS[1] job hash   KEYS[2] its inputs   KEYS[3] its images
-- ARGV[1] terminal state   ARGV[2] error   ARGV[3] count that takes the rest   ARGV[4] time to live, seconds
-- ARGV[5] '1': only when nothing has been started (state queued)
-- Returns 1 when this call ended it; 0 when it was terminal or unknown, or started although ARGV[5] forbids it;
-- -1 when success was claimed with samples missing.
local job = redis.call('HMGET', KEYS[1], 'state', 'total', 'recorded')
local state = job[1]
if state ~= 'queued' and state ~= 'running' then return 0 end
if ARGV[5] == '1' and state ~= 'queued' then return 0 end
local rest = tonumber(job[2]) - tonumber(job[3] or '0')
if ARGV[1] == 'succeeded' and rest > 0 then return -1 end
redis.call('HSET', KEYS[1], 'state', ARGV[1], 'error', ARGV[2], 'finished_ms', now_ms())
if rest > 0 then redis.call('HINCRBY', KEYS[1], ARGV[3], string.format('%d', rest)) end
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
redis.call('EXPIRE', KEYS[3], ARGV[4])
return 1
