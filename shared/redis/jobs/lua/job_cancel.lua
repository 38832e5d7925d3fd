-- Ask for a job's end.
-- KEYS[1] job hash
-- Returns its state, or '' when it is unknown.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return '' end
if state == 'queued' or state == 'running' then redis.call('HSET', KEYS[1], 'cancel', '1') end
return state
