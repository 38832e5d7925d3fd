-- Forget a response or a conversation.
-- uses: clock kept_things
-- KEYS[1] the thing   KEYS[2] uses   KEYS[3] sizes   ARGV[1] prefix of the keeper's keys   ARGV[2] id
-- Returns whether it was there.
local there = redis.call('EXISTS', KEYS[1])
forget(ARGV[1], ARGV[2])
return there
