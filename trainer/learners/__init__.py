"""A run's learner, wherever it is: in a thread of its own process, or in the training service.

`loop_learner.py` is what the loop sees of it, `asks.py` what is asked of one in the service, and `obeying.py` does it.
"""
