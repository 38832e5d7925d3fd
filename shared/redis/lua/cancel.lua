-- Cancel one sequence. Still queued: it ends here and now. Running: its worker is to be told.
--
-- KEYS[1] sequence hash  KEYS[2] its log  KEYS[3] finished stream of its job
-- ARGV[1] group  ARGV[2] result (msgpack) of a sequence that never ran  ARGV[3] its only log chunk
-- ARGV[4] ttl  ARGV[5] ttl of the finished stream  ARGV[6] '1' when a job gathers the result  ARGV[7] sequence id
-- Returns '' (unknown or ended), 'queued', or 'worker:<id>'.
local h = redis.call('HMGET', KEYS[1], 'state', 'stream', 'entry', 'worker', 'attempt')
if not h[1] or h[1] == 'done' then return '' end
redis.call('HSET', KEYS[1], 'cancel', '1')
if h[1] == 'running' then return 'worker:' .. h[4] end
if tonumber(h[5]) > 0 then return 'worker:' end  -- handed back with tokens of its own: the next claim ends it
redis.call('XDEL', h[2], h[3])
redis.call('HSET', KEYS[1], 'state', 'done')
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('XADD', KEYS[2], '*', 'd', ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[4])
if ARGV[6] == '1' then
  redis.call('XADD', KEYS[3], '*', 'id', ARGV[7], 'result', ARGV[2])
  redis.call('EXPIRE', KEYS[3], ARGV[5])
end
return 'queued'
