-- Renew leases, after checking that each is still this worker's under this attempt.
--
-- KEYS             per sequence: its hash, its stream
-- ARGV[1] group    ARGV[2] worker
-- ARGV[3..]        per sequence: entry, attempt
-- Returns the numbers (from 0) of the sequences that are no longer this worker's.
local lost = {}
for i = 1, #KEYS / 2 do
  local seq, stream, entry, attempt = KEYS[2 * i - 1], KEYS[2 * i], ARGV[2 * i + 1], ARGV[2 * i + 2]
  local h = redis.call('HMGET', seq, 'state', 'worker', 'attempt')
  local ours = h[1] == 'running' and h[2] == ARGV[2] and h[3] == attempt
  if ours then
    local renewed = redis.pcall('XCLAIM', stream, ARGV[1], ARGV[2], 0, entry, 'JUSTID')
    ours = not renewed.err and #renewed > 0
  end
  if not ours then lost[#lost + 1] = i - 1 end
end
return lost
