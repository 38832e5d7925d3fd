-- What waits for one model, and runs on it.
-- uses: streams
--
-- KEYS[1] worker ids of the model (its streams and sequences share the slot)
-- ARGV[1] group     ARGV[2] what sequence hashes begin with   ARGV[3] lease_ms: unrenewed for so long, a worker has died
-- ARGV[4] most entries of a stream to look at; what waits beyond them is counted unseen
-- ARGV[5] most workers whose streams to look at               ARGV[6..] classes, then '', then places besides workers
-- Returns {earliest deadline, then for each class: waiting, running, ms that the oldest has waited}.
local now, most = server_ms(), tonumber(ARGV[4])
local classes, places = {}, redis.call('ZREVRANGE', KEYS[1], 0, tonumber(ARGV[5]) - 1)
local at = 6
while ARGV[at] ~= '' do
  classes[#classes + 1] = ARGV[at]
  at = at + 1
end
for i = at + 1, #ARGV do places[#places + 1] = ARGV[i] end
local prefix = string.match(KEYS[1], '^(.*):workers$') .. ':queue:'
local earliest = 0

-- Whether a sequence is still wanted; notes its deadline.
local function wanted(id)
  if not id or not is_hash(ARGV[2] .. id) then return false end
  local h = redis.call('HMGET', ARGV[2] .. id, 'cancel', 'deadline', 'first', 'attempt')
  local deadline, first = tonumber(h[2] or '') or 0, tonumber(h[3] or '') or 0
  if h[4] == '0' and first > 0 and (deadline == 0 or first < deadline) then deadline = first end
  if h[1] or (deadline > 0 and deadline <= now) then return false end
  if deadline > 0 and (earliest == 0 or deadline < earliest) then earliest = deadline end
  return true
end

local function ms_of(entry) return tonumber(string.match(entry, '^%d+')) end

local counts = {}
for _, class in ipairs(classes) do
  local waiting, running, since = 0, 0, now
  for _, place in ipairs(places) do
    local stream = prefix .. class .. (place == '-' and '' or ':' .. place)
    local _, pending = group_of(stream, ARGV[1])
    if pending then
      local seen = undelivered(stream, ARGV[1], most)
      waiting = waiting + math.max(0, redis.call('XLEN', stream) - pending - #seen)
      for _, entry in ipairs(seen) do
        if wanted(fields_of(entry).id) then
          waiting, since = waiting + 1, math.min(since, ms_of(entry[1]))
        end
      end
      local left = {}
      if pending > 0 then left = redis.call('XPENDING', stream, ARGV[1], 'IDLE', ARGV[3], '-', '+', most) end
      running = running + pending - #left
      for _, each in ipairs(left) do
        local entry = redis.call('XRANGE', stream, each[1], each[1])[1]
        if entry and wanted(fields_of(entry).id) then
          waiting, since = waiting + 1, math.min(since, ms_of(entry[1]))
        end
      end
    end
  end
  for _, count in ipairs({waiting, running, now - since}) do counts[#counts + 1] = count end
end
return {earliest, unpack(counts)}
