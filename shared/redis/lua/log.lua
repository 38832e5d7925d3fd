-- Append chunks to the logs of running sequences; a chunk of an older attempt is refused, so that what stands in a log when
-- a sequence is taken over is what its client may have seen, and stays.
--
-- KEYS             per chunk: sequence hash, its log
-- ARGV[1] ttl      seconds, until the sequence ends
-- ARGV[2..]        per chunk: attempt, events (msgpack)
-- Returns how many were taken.
local taken = 0
for i = 1, #KEYS / 2 do
  local seq, log = KEYS[2 * i - 1], KEYS[2 * i]
  local h = redis.call('HMGET', seq, 'state', 'attempt')
  if h[1] == 'running' and h[2] == ARGV[2 * i] then
    redis.call('XADD', log, '*', 'd', ARGV[2 * i + 1])
    redis.call('EXPIRE', log, ARGV[1])
    taken = taken + 1
  end
end
return taken
