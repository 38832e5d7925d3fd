"""Runs: each offers versions, has them gated, accepts or reverts them, saves, resumes, reports and stops.

`run.py` is the life that all of them share; `kinds.py` chooses the run that the settings ask for. `loop.py` learns from
rollouts and live traffic (`--mode rl`): `rl.py` opens it, `parts.py` is what it is made of, `inbox.py` what it trains
on next, `served.py` the versions that workers sample from (`examine.py`, `foreign.py`, `posted.py`), `orders.py` what
users ask of it, `metrics.py` what it reports. `data.py` is a run on a data set: `tuning.py` (sft, dpo), `distillation/`
and `heads.py` (`--mode reward`). `ppo.py` trains a network that acts (`acting.py`, `numeric_environments.py`).
`team.py` and `agents.py`: several policies in one process. `stopping.py` turns signals into an end in order.
"""
