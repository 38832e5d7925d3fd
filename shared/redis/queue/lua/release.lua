-- Hand leased sequences back: any worker can claim them at once, before what has not begun. No death is counted, unless
-- the engine has failed while it ran them: then each counts one, as when a worker dies, suspects are divided, and one
-- that is poison by that (streams.lua) stays leased for the reaper, who gives it up.
-- uses: streams
--
-- KEYS[1] handed back interactive  KEYS[2] handed back batch  KEYS[3] suspects interactive  KEYS[4] suspects batch
-- ARGV[1] group    ARGV[2] worker   ARGV[3] prefix of sequence hashes   ARGV[4] ttl   ARGV[5] suspect_after
-- ARGV[6] max_deaths  when the engine has failed, else ''
-- ARGV[7..]        per sequence: id, attempt, '1' for batch
-- Returns how many were this worker's.
local group, worker, prefix, ttl, suspect_after = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local max_deaths = tonumber(ARGV[6])
local released = 0
local suspects = {{}, {}} -- interactive and batch
for a = 7, #ARGV, 3 do
  local h = redis.call('HMGET', prefix .. ARGV[a], 'state', 'worker', 'attempt', 'stream', 'entry', 'deaths')
  if h[1] == 'running' and h[2] == worker and h[3] == ARGV[a + 1] then
    local entry = redis.call('XRANGE', h[4], h[5], h[5])[1]
    local deaths = tonumber(h[6] or '0') + (max_deaths and 1 or 0)
    local class = ARGV[a + 2] == '1' and 2 or 1
    if entry and not (max_deaths and is_poison(prefix .. ARGV[a], deaths, max_deaths)) then
      if max_deaths then redis.call('HSET', prefix .. ARGV[a], 'deaths', deaths) end
      redis.call('HSET', prefix .. ARGV[a], 'kv_at', worker) -- whoever goes on with it may get its KV there
      if max_deaths and deaths >= suspect_after then
        table.insert(suspects[class], {h[4], entry})
      else
        move(h[4], group, entry, KEYS[class + (deaths >= suspect_after and 2 or 0)], prefix, ttl)
      end
      released = released + 1
    end
  end
end
for class = 1, 2 do
  divide(suspects[class], worker .. '@' .. server_ms(), group, KEYS[2 + class], prefix, ttl)
end
return released
