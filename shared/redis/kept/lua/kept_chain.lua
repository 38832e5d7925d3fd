-- A response and those that it follows, the last one first. All of them count as used now.
-- uses: clock kept_things
-- KEYS[1] the last one   (the others share its slot)
-- ARGV[1] prefix of the keeper's keys   ARGV[2] its id   ARGV[3] ttl, seconds   ARGV[4] most responses
-- ARGV[5] most bytes of all
-- Returns for each {id, state or false when it is not there, conversation, input, output, ids}; at the end 'long' when
-- there are more.
local found, id, bytes = {}, ARGV[2], 0
while id and id ~= '' do
  if #found >= tonumber(ARGV[4]) or bytes > tonumber(ARGV[5]) then
    found[#found + 1] = 'long'
    return found
  end
  local h = redis.call('HMGET', ARGV[1] .. 'thing:' .. id, 'state', 'conversation', 'input', 'output', 'ids', 'previous')
  found[#found + 1] = {id, h[1], h[2], h[3], h[4], h[5]}
  bytes = bytes + #(h[3] or '') + #(h[4] or '')
  if h[1] then use(ARGV[1], id, ARGV[3]) end
  id = h[6]
end
return found
