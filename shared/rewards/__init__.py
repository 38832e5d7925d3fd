"""The rewards: their names and options, and the function of each.

`kinds.py` first: the registry REWARDS, and the check of a reward where it enters. `functions.py` has the functions,
with `gsm8k.py` and `math.py` for the long ones.
`model_kinds.py` has the options of rewards that a served model gives. Where they are computed is `shared/scoring/`.
"""
