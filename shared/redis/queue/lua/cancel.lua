-- Cancel one sequence. One that waits ends at once, if the caller has read its tokens so far. One that runs is marked, and
-- the caller tells its worker; if that worker dies, the next claim ends it.
-- uses: bounded ending
--
-- KEYS[1] sequence hash   KEYS[2] its log   KEYS[3] finished stream of its job
-- KEYS[4] collected sequences of live traffic   KEYS[5] their stats
-- ARGV[1] group    ARGV[2] sequence id
-- ARGV[3] attempt  after which the caller read its tokens ('' not read)
-- ARGV[4] result   msgpack   ARGV[5] tail: last log chunk (msgpack)
-- ARGV[6] ttl      of hash and log   ARGV[7] job_ttl of the finished stream
-- ARGV[8] '1' when a job gathers the result; else none does any more, whatever the spec says   ARGV[9] '1' when nobody streams it
-- ARGV[10] '1' when it is collected   ARGV[11] most entries   ARGV[12] most bytes   ARGV[13] ttl   ARGV[14] their group
-- Returns '' (unknown or ended), 'queued' (ended now), 'worker:<id>' (runs there), 'read:' (read its tokens first).
local h = redis.call('HMGET', KEYS[1], 'state', 'stream', 'entry', 'worker', 'attempt')
if not h[1] or has_ended(h[1]) then return '' end
if h[1] == 'running' then
  redis.call('HSET', KEYS[1], 'cancel', '1')
  if ARGV[8] ~= '1' then redis.call('HSET', KEYS[1], 'job', '') end
  return 'worker:' .. h[4]
end
if h[5] ~= ARGV[3] then return 'read:' end
redis.call('XACK', h[2], ARGV[1], h[3])
redis.call('XDEL', h[2], h[3])
if ARGV[10] == '1' then
  collect(KEYS[4], KEYS[5], KEYS[1], ARGV[2], ARGV[4], ARGV[11], ARGV[12], ARGV[13], ARGV[14])
end
finish(KEYS[1], KEYS[2], KEYS[3], ARGV[2], 'cancelled', ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8] == '1', ARGV[9] == '1')
return 'queued'
