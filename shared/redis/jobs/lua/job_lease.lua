-- Renew or give back a job's lease; only its owner may.
-- KEYS[1] lease
-- ARGV[1] runner   ARGV[2] milliseconds from now; 0 gives it back
-- Returns 1 when the lease was the caller's, else 0.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then
  redis.call('DEL', KEYS[1])
else
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 1
