"""The worker: an engine thread that decodes, and an asyncio side that connects it to Redis.

    __main__.py   `mlx_parallm_worker`
    process.py    the loops: claim, renew, publish, heartbeat, drain. Read it first.
    rows.py       one claimed sequence from claim to commit, and the table of them that the loops share
    claim_plan.py, claims.py     how many rows to claim; from a claim to the engine, and back to the queue
    service_rates.py             at what pace a full worker claims, and how soon first tokens come
    publisher.py  from a decode step to frames, log chunks and commits
    control.py    orders from outside: cancel, route, pause
    pause.py, drain.py     coming to rest, and leaving
    pictures.py   images of claimed sequences, cut into what the model sees
    adapters/     adapter versions from the store to disk and engine
    engine_watch.py, reports.py, cache_resets.py     is the engine alive; heartbeats; orders to forget KV
    machine_watch.py, memory_relief.py     the machine's memory, power and heat; what is given up when memory is short
    downloads.py  how far a model's download is
    court.py      computes again what other workers wrote, while idle
    ring_memory.py     what sequences have written, shared for drafts
    peers/        KV that workers fetch from one another
    tune.py       measures a model on this machine, for `mlx_parallm doctor --tune`
    invariance.py      tries `--batch-invariant` with a model on this machine, for `mlx_parallm doctor`
    guest.py      another user of the engine thread, such as a trainer

`engine/` is the continuous batch on MLX. `jobs/` is the job runner, another process, without MLX.
"""
