-- Hand leased sequences back: each goes to the end of its class's shared stream as a new entry, at once claimable, and
-- its deaths do not count up.
--
-- KEYS[1] stream  KEYS[2] shared stream of the class  KEYS[3] sequence hash
-- ARGV[1] group  ARGV[2] worker  ARGV[3] entry  ARGV[4] ttl
-- Returns 1, or 0 when the entry is not this worker's.
local p = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if p.err or #p == 0 then return 0 end
local found = redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
if #found == 0 then return 0 end
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('XGROUP', 'CREATE', KEYS[2], ARGV[1], '0', 'MKSTREAM') end
local entry = redis.call('XADD', KEYS[2], '*', unpack(found[1][2]))
redis.call('EXPIRE', KEYS[2], ARGV[4])
redis.call('HSET', KEYS[3], 'state', 'queued', 'worker', '', 'stream', KEYS[2], 'entry', entry)
return 1
