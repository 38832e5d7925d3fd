-- Forget a learner, so that nothing more of it can be written; what is left of it goes after.
-- KEYS[1] learner   KEYS[2] its requests
-- Returns the id of its state, '' for none.
local state = redis.call('HGET', KEYS[1], 'state')
redis.call('UNLINK', KEYS[1], KEYS[2])
return state or ''
