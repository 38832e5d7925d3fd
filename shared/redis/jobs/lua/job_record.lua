-- Store finished samples; each ordinal counts once, however often it is recorded. A terminal job takes no more.
-- uses: clock
-- KEYS[1] job hash   KEYS[2] prefix of the result chunks (the chunk number is appended; same hash tag)
-- KEYS[3] list of ordinals in the order in which they are recorded
-- ARGV[1] time to live, seconds   ARGV[2] ordinals a chunk   ARGV[3] most ordinals that complete_through may walk
-- ARGV[4...] seven a sample: ordinal, line, outcome, prompt tokens, completion tokens, reward or '', reward error 0/1
-- Returns {samples that were new, complete_through}, or {-1, 0} when the job is terminal or unknown.
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'queued' and state ~= 'running' then return {-1, 0} end
local per_chunk = tonumber(ARGV[2])
local function chunk_of(ordinal)
  return KEYS[2] .. string.format('%d', math.floor(ordinal / per_chunk))
end

local new = 0
local sums = {}
local function add(field, amount) sums[field] = (sums[field] or 0) + amount end
local reward_sum = 0.0
local touched = {}
for i = 4, #ARGV, 7 do
  local chunk = chunk_of(tonumber(ARGV[i]))
  if redis.call('HSETNX', chunk, ARGV[i], ARGV[i + 1]) == 1 then
    new = new + 1
    redis.call('RPUSH', KEYS[3], ARGV[i])
    touched[chunk] = true
    add(ARGV[i + 2], 1)
    add('prompt_tokens', tonumber(ARGV[i + 3]))
    add('completion_tokens', tonumber(ARGV[i + 4]))
    if ARGV[i + 5] ~= '' then
      add('rewarded', 1)
      reward_sum = reward_sum + tonumber(ARGV[i + 5])
    end
    add('reward_errors', tonumber(ARGV[i + 6]))
  end
end
for chunk in pairs(touched) do redis.call('EXPIRE', chunk, ARGV[1]) end
for field, amount in pairs(sums) do
  if amount ~= 0 then redis.call('HINCRBY', KEYS[1], field, string.format('%d', amount)) end
end
if reward_sum ~= 0 then redis.call('HINCRBYFLOAT', KEYS[1], 'reward_sum', string.format('%.17g', reward_sum)) end

local through = tonumber(redis.call('HGET', KEYS[1], 'complete_through') or '0')
local last = through + tonumber(ARGV[3])
while through < last and redis.call('HEXISTS', chunk_of(through), string.format('%d', through)) == 1 do
  through = through + 1
end
redis.call('HSET', KEYS[1], 'complete_through', string.format('%d', through))
if new > 0 then
  redis.call('HINCRBY', KEYS[1], 'recorded', new)
  redis.call('HSET', KEYS[1], 'progress_ms', now_ms())
  redis.call('EXPIRE', KEYS[1], ARGV[1])
  redis.call('EXPIRE', KEYS[3], ARGV[1])
end
return {new, through}
