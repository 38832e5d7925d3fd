"""The rewards: their names and options, and the function of each.

`kinds.py` first: the registry REWARDS, checked at submission. `functions.py` finds a reward's function, which stands in
the file of its name: `exact.py`, `regex.py`, `gsm8k.py`, `math.py`, `format.py`, `length.py`, `weighted.py`.
`model_kinds.py` has the options of rewards that a served model gives. Where they are computed is `shared/scoring/`.
"""
