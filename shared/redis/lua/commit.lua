-- End a sequence exactly once. Refused unless this worker holds the lease under this attempt; said again after a lost
-- answer it is accepted again and changes nothing.
--
-- KEYS[1] stream  KEYS[2] sequence hash  KEYS[3] its log  KEYS[4] finished stream of its job  KEYS[5] dead letters
-- ARGV[1] group  ARGV[2] worker  ARGV[3] entry  ARGV[4] attempt
-- ARGV[5] result (msgpack)  ARGV[6] last log chunk (msgpack; '' none)
-- ARGV[7] ttl of hash and log  ARGV[8] ttl of the finished stream
-- ARGV[9] '1' when a job gathers the result  ARGV[10] '1' when nobody streams it (the log is dropped)
-- ARGV[11] dead letter's reason ('' none)  ARGV[12] sequence id
-- Returns 1 when the end is ours, else 0.
local seq = KEYS[2]
local h = redis.call('HMGET', seq, 'state', 'attempt', 'worker')
if h[1] == 'done' then return (h[2] == ARGV[4] and h[3] == ARGV[2]) and 1 or 0 end
local p = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1, ARGV[2])
if p.err or #p == 0 or h[2] ~= ARGV[4] then return 0 end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
redis.call('HSET', seq, 'state', 'done', 'finished', redis.call('TIME')[1])
redis.call('EXPIRE', seq, ARGV[7])
if ARGV[10] == '1' then
  redis.call('DEL', KEYS[3])
  redis.call('HDEL', seq, 'spec')
elseif ARGV[6] ~= '' then
  redis.call('XADD', KEYS[3], '*', 'd', ARGV[6])
  redis.call('EXPIRE', KEYS[3], ARGV[7])
end
if ARGV[9] == '1' then
  redis.call('XADD', KEYS[4], '*', 'id', ARGV[12], 'result', ARGV[5])
  redis.call('EXPIRE', KEYS[4], ARGV[8])
end
if ARGV[11] ~= '' then
  redis.call('XADD', KEYS[5], 'MAXLEN', '~', 1000, '*', 'id', ARGV[12], 'reason', ARGV[11], 'worker', ARGV[2],
    'attempt', ARGV[4])
  redis.call('EXPIRE', KEYS[5], ARGV[8])
end
return 1
