-- Delete a load lease or an order, if it is still the caller's. May be repeated.
--
-- KEYS[1] lease, or orders   ARGV[1] value that it must have   ARGV[2] field of the orders, '' for a lease
if ARGV[2] == '' then
  if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
elseif redis.call('HGET', KEYS[1], ARGV[2]) == ARGV[1] then return redis.call('HDEL', KEYS[1], ARGV[2]) end
return 0
