-- Give what waits in a leaving worker's affinity streams to all, and remove the streams if nothing is leased in them.
-- Its heartbeat says from now on that it leaves, so that nothing more is enqueued there.
-- uses: streams
--
-- KEYS[1] handed back interactive   KEYS[2] handed back batch   KEYS[3] the worker's interactive   KEYS[4] its batch
-- KEYS[5] its heartbeat
-- ARGV[1] group    ARGV[2] prefix of sequence hashes   ARGV[3] ttl
-- Returns the number of moved entries.
if redis.call('EXISTS', KEYS[5]) == 1 then redis.call('HSET', KEYS[5], 'state', 'draining') end
local moved = 0
for i = 1, 2 do
  local stream = KEYS[i + 2]
  local ahead = undelivered(stream, ARGV[1], 1000)
  while #ahead > 0 do
    for _, entry in ipairs(ahead) do move(stream, ARGV[1], entry, KEYS[i], ARGV[2], ARGV[3]) end
    moved = moved + #ahead
    ahead = undelivered(stream, ARGV[1], 1000)
  end
  if redis.call('XLEN', stream) == 0 then redis.call('DEL', stream) end
end
return moved
