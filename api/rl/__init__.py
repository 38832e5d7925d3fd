"""Routes that loops of reinforcement learning use, besides chats and jobs.

`generate.py` and `generate_tokens.py` (tokens in, tokens out), `act.py` (observations to actions; `policies.py` draws
those of networks, `sessions.py` keeps their state), `predict.py` (named tensors), `rewards.py` (score texts at once),
`feedback.py` (verdicts on answers of the last days), `episodes.py` (conversations, turn by turn), `replay.py` (compute
an answer again), `tokenize.py`. Each endpoint is one file and stands alone; training runs are in `api/training/`, jobs
in `api/jobs/`.
"""
