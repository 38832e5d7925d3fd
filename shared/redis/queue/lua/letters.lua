-- Dead letters; client.py puts this in front of every script that says `-- uses: letters`.

-- `spec` is what is needed to run it again ('' nothing); `stream` is where it stood.
local function dead_letter(letters, ttl, id, reason, worker, attempt, job, stream, spec)
  redis.call('XADD', letters, 'MAXLEN', '~', 1000, '*', 'id', id, 'reason', reason, 'worker', worker,
    'attempt', attempt, 'job', job, 'stream', stream, 'spec', spec)
  redis.call('EXPIRE', letters, ttl)
end
