-- End the split of an adapter in the call that moves `latest`: for good, so that moving it back revives nothing.
local function split_close(split, answers, latest)
  if redis.call('EXISTS', split) == 0 or redis.call('HEXISTS', split, 'verdict') == 1 then return end
  redis.call('HSETNX', split, 'moved', latest)
  redis.call('UNLINK', answers)
end
