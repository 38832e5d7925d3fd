-- Whose a policy is: its adapter's owner, else that of what its trainer tells; nil when there is neither.
local function policy_owner(adapter, training)
  for _, key in ipairs({adapter, training}) do
    if redis.call('EXISTS', key) == 1 then return redis.call('HGET', key, 'tenant') or '' end
  end
  return nil
end
