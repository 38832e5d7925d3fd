"""Everything that touches Redis: one folder for each thing that is stored there.

Read `keys.py` first: every key with its name, type, owner and time to live. Then:

    queue/       sequences that wait or are leased
    tokens/      token frames and logs, on their way back to an api
    jobs/        durable jobs and their ticks
    files/       files and batches
    kept/        responses and conversations that are kept between requests
    due/         what is to be done from some time on, by whichever process looks first
    adapters/    adapter versions and their pointers
    training/    live trajectories, orders to a trainer, its board
    processes/   workers' heartbeats, the pause switch, summed metrics
    recordings.py  ended sequences, stored to be computed again
    connection/  clients, Sentinel, Redis Cluster, and what an error may say

What several of them are made of: `stream.py` (entries that a consumer group reads), `chunks.py` (bytes),
`stored.py` (one message under one key) and `poll.py` (waiting for a key). The server's program: `server_binary.py`.

A change of several keys is one Lua script, which stands in the `lua` folder of its room. In a cluster its keys share a
slot; what is written for several slots is written in an order in which each step may be the last, and be repeated.
"""
