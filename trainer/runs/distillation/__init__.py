"""Runs that learn from a teacher's probabilities.

`distilling.py` is the run, `teacher.py` asks for the scores, and `hindsight.py` reads what sessions teach: the model
that is given a correction teaches the model without it. `examination.py` compares the policy before and after.
"""
