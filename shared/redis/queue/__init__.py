"""The queue of sequences: from enqueue to claim to commit.

`sequence_queue.py` first. `settlement.py` writes ends that no engine gives, `dead_letters.py` keeps what was given up,
`affinity.py` says which worker is best for a prompt. `sequence_calls.py` enqueues and waits, for processes without a
client to stream to; `replayer.py` computes ended sequences again with it;
`named_requests.py` finds requests by their clients' names. The rules of leases and attempts stand
in `lua/`: `enqueue`, `claim`, `renew`, `commit`, `reap`.
"""
