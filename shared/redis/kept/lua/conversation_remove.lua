-- Remove an item from a conversation.
-- KEYS[1] the conversation   KEYS[2] its order   KEYS[3] sizes   ARGV[1] id   ARGV[2] item id
-- Returns whether the item was there.
local size = redis.call('HSTRLEN', KEYS[1], 'item:' .. ARGV[2])
if redis.call('HDEL', KEYS[1], 'item:' .. ARGV[2]) == 0 then return 0 end
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('HINCRBY', KEYS[3], ARGV[1], -size - #ARGV[2])
redis.call('HINCRBY', KEYS[3], 'all', -size - #ARGV[2])
return 1
