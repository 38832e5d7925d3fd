"""Learners: one class per kind of learning, and one mechanism for where it computes.

What learns: `policy.py` (from groups of scored samples), `data.py` with `tuning.py`, `distilling.py` and `heads.py`
(from the items of a data set, which `lines.py`, `tuning_examples.py` and `head_examples.py` read), `ppo.py` (networks).

Where it computes: a run calls exposed methods (`calls.py`) through a handle (`handle.py`), in this process's thread or
a worker's engine; `kinds.py` builds a learner from plain data. `ranks.py`: several ranks carry out each call together
(`placing.py`, `group.py`). `service.py`: the training service has the learner. `shared.py`: other processes compute
parts of its train steps (`shared_step.py`, `shared_exchange.py`; `shared_member.py` is such a process).
`federation.py`: runs average their weights.
"""
