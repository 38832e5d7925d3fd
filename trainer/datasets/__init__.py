"""Runs that learn from a data set in place of rollouts: what heads (`heads/`) and tuning (`tuning/`) share.

`run.py` first: from settings to published versions. `lines.py` reads, splits and draws the data, `learner.py` makes a
train step of what one kind of run calls its loss.
"""
