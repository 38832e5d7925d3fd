-- Put a dead letter's sequence back into the queue, once, under an id that follows from the letter's.
-- uses: streams
--
-- KEYS[1] dead letters   KEYS[2] stream of its class   KEYS[3] hash of the new sequence
-- ARGV[1] group   ARGV[2] ttl   ARGV[3] the letter's entry   ARGV[4] new id   ARGV[5] KV tokens   ARGV[6] spec (msgpack)
-- ARGV[7] who owns it
-- Returns 1 when this call did it, 2 when it was done before, 0 when there is no such letter.
if redis.call('EXISTS', KEYS[3]) == 1 then return 2 end
if redis.call('XDEL', KEYS[1], ARGV[3]) == 0 then return 0 end
open_stream(KEYS[2], ARGV[1], ARGV[2])
local entry = redis.call('XADD', KEYS[2], '*', 'id', ARGV[4], 'group', '', 'kv', ARGV[5])
redis.call('HSET', KEYS[3], 'state', 'queued', 'stream', KEYS[2], 'entry', entry, 'attempt', 0, 'worker', '',
  'api', '', 'deadline', 0, 'job', '', 'spec', ARGV[6], 'tenant', ARGV[7])
redis.call('EXPIRE', KEYS[3], ARGV[2])
return 1
