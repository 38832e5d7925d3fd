-- End a sequence exactly once. Refused unless this worker holds it under this attempt. A call that is repeated, because
-- its answer was lost, is accepted again and changes nothing.
-- uses: bounded ending letters
--
-- KEYS[1] stream   KEYS[2] sequence hash   KEYS[3] its log   KEYS[4] finished stream of its job   KEYS[5] dead letters
-- KEYS[6] collected sequences of live traffic   KEYS[7] their stats   KEYS[8] recording   KEYS[9] index of recordings
-- KEYS[10] their stats   KEYS[11] sequences that other workers are to check   KEYS[12] their stats
-- ARGV[1] group    ARGV[2] worker   ARGV[3] entry   ARGV[4] attempt
-- ARGV[5] state    'done' or 'cancelled'
-- ARGV[6] result   msgpack   ARGV[7] tail: last log chunk (msgpack; '' none)
-- ARGV[8] ttl      of hash and log   ARGV[9] job_ttl of the finished stream
-- ARGV[10] '1' when a job gathers the result, unless it has ended (an empty `job` in the hash)   ARGV[11] '1' when nobody streams it
-- ARGV[12] reason  of the dead letter ('' none)   ARGV[13] sequence id
-- ARGV[14] '1' when it is collected   ARGV[15] most entries   ARGV[16] most bytes   ARGV[17] ttl   ARGV[18] their group
-- ARGV[19] start   position of the tail's first token
-- ARGV[20] record_s  for which it is recorded (0: it is not)   ARGV[21] most bytes of recordings
-- ARGV[22] '1' when another worker is to check it   ARGV[23] most entries   ARGV[24] most bytes   ARGV[25] ttl
-- Returns 1 when the end is accepted; 2 when it would be, but the tail does not follow the log: nothing is done, and the
-- caller must repeat it with all tokens as the tail; else 0.
local h = redis.call('HMGET', KEYS[2], 'state', 'attempt', 'worker', 'spec', 'job', 'logged')
local ours = h[2] == ARGV[4] and h[3] == ARGV[2]
if has_ended(h[1]) then return ours and 1 or 0 end
if not ours or h[1] ~= 'running' then return 0 end
local logged = tonumber(h[6] or '0') or 0
if ARGV[11] ~= '1' and tonumber(ARGV[19]) > logged then return 2 end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
if ARGV[14] == '1' then
  collect(KEYS[6], KEYS[7], KEYS[2], ARGV[13], ARGV[6], ARGV[15], ARGV[16], ARGV[17], ARGV[18])
end
if tonumber(ARGV[20]) > 0 then
  record(KEYS[8], KEYS[9], KEYS[10], KEYS[2], ARGV[13], ARGV[6], tonumber(ARGV[20]), tonumber(ARGV[21]))
end
if ARGV[22] == '1' then
  collect(KEYS[11], KEYS[12], KEYS[2], ARGV[13], ARGV[6], ARGV[23], ARGV[24], ARGV[25], ARGV[1])
end
local gathered = ARGV[10] == '1' and h[5] ~= ''
finish(KEYS[2], KEYS[3], KEYS[4], ARGV[13], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9], gathered, ARGV[11] == '1')
if ARGV[12] ~= '' then
  dead_letter(KEYS[5], ARGV[9], ARGV[13], ARGV[12], ARGV[2], ARGV[4], h[5] or '', KEYS[1], h[4] or '')
end
return 1
