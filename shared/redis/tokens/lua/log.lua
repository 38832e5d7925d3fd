-- Append chunks to the logs of running sequences. A chunk of an older attempt or another worker is refused, so that what
-- stands in a log when a sequence is taken over is what its client may have seen, and stays. So is a chunk that does not
-- join on to what is there, which happens when Redis has lost its last second: its writer is to log it all again.
--
-- KEYS             per chunk: sequence hash, its log
-- ARGV[1] ttl      seconds, until the sequence ends   ARGV[2] worker
-- ARGV[3..]        per chunk: attempt, position of its first token, position after its last, events (msgpack)
-- Returns the numbers (from 0) of the chunks that do not join on.
local gaps = {}
for i = 1, #KEYS / 2 do
  local seq, log, a = KEYS[2 * i - 1], KEYS[2 * i], 4 * i - 1
  local h = redis.call('HMGET', seq, 'state', 'attempt', 'worker', 'logged')
  local logged = tonumber(h[4] or '0') or 0
  if h[1] == 'running' and h[2] == ARGV[a] and h[3] == ARGV[2] then
    if tonumber(ARGV[a + 1]) > logged then
      gaps[#gaps + 1] = i - 1
    else
      redis.call('XADD', log, '*', 'd', ARGV[a + 3])
      redis.call('EXPIRE', log, ARGV[1])
      if tonumber(ARGV[a + 2]) > logged then redis.call('HSET', seq, 'logged', ARGV[a + 2]) end
    end
  end
end
return gaps
