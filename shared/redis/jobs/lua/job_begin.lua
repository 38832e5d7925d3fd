-- Start one tick of a job: take its lease, count the tick, and turn queued into running.
-- uses: clock
-- KEYS[1] job hash   KEYS[2] lease
-- ARGV[1] runner   ARGV[2] tick number that the caller was asked to run   ARGV[3] lease, milliseconds
-- Returns the number of the tick that follows, or -1: terminal, unknown, or this tick has already been started;
-- -2: another runner holds the lease.
local job = redis.call('HMGET', KEYS[1], 'state', 'tick')
local state = job[1]
if state ~= 'queued' and state ~= 'running' then return -1 end
if (job[2] or '0') ~= ARGV[2] then return -1 end
if not redis.call('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[3]) then return -2 end
if state == 'queued' then
  local now = now_ms()
  redis.call('HSET', KEYS[1], 'state', 'running', 'started_ms', now, 'progress_ms', now)
end
return redis.call('HINCRBY', KEYS[1], 'tick', 1)
