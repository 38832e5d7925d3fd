-- Take a message that nobody can work with out of its stream, and keep it as a dead letter.
-- uses: streams letters
--
-- KEYS[1] the stream   KEYS[2] dead letters
-- ARGV[1] group ('' the stream has none)   ARGV[2] entry   ARGV[3] id   ARGV[4] reason   ARGV[5] who found it
-- ARGV[6] the message   ARGV[7] ttl of the letters
-- Returns 1 when it was there.
if ARGV[1] ~= '' then redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) end
if redis.call('XDEL', KEYS[1], ARGV[2]) == 0 then return 0 end
dead_letter(KEYS[2], ARGV[7], ARGV[3], ARGV[4], ARGV[5], 0, '', KEYS[1], ARGV[6])
return 1
