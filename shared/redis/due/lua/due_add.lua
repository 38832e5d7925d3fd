-- Add an entry; one that is there keeps its time.
-- uses: clock due
-- ARGV[1] entry   ARGV[2] milliseconds from now   ARGV[3] ttl, seconds   ARGV[4] whose
local now, entry, who = tonumber(now_ms()), ARGV[1], whose(ARGV[1])
if who == '' and ARGV[4] ~= '' and not redis.call('ZSCORE', KEYS[1], entry) then
  who = ARGV[4]
  redis.call('HSET', KEYS[3], entry, who)
end
redis.call('ZADD', list_of(who), 'NX', string.format('%d', now + ARGV[2]), entry)
settle(who, now, ARGV[3])
