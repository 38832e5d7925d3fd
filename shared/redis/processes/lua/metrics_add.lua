-- Add to the totals what a process has counted since its last call.
--
-- The process's hash holds what it has said last, so the call may be repeated, and a process that dies leaves its
-- counts in the totals. Should the hash be gone although the process has spoken before (it slept past the time to
-- live), the counts that it has are in the totals already: it is asked for all of them, and they are only written down.
--
-- KEYS[1] process hash   KEYS[2] totals hash
-- ARGV[1] mode           'first', 'next', or 'again' (write down, add nothing)
-- ARGV[2] ttl of the process hash   ARGV[3] ttl of the totals   ARGV[4] role   ARGV[5] Unix ms
-- ARGV[6..] field, value, field, value, ...: since the process's start
-- Returns 1, or 0 when the process is to speak in the mode 'again'.
if ARGV[1] == 'next' and redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
for i = 6, #ARGV, 2 do
  local said = redis.call('HGET', KEYS[1], ARGV[i])
  local grown = tonumber(ARGV[i + 1]) - tonumber(said or '0')
  if grown ~= 0 or not said then -- a counter that has counted nothing yet is known, too
    if ARGV[1] ~= 'again' then redis.call('HINCRBYFLOAT', KEYS[2], ARGV[i], string.format('%.17g', grown)) end
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
redis.call('HSET', KEYS[1], 'role', ARGV[4], 'at_ms', ARGV[5])
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
