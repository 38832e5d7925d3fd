"""Code of the user's own, a reward or an environment, in a process that can be killed.

Our side is `own_code.py`, its side `own_process.py`, or `copies.py` where a network acts; `own_messages.py` has what
they send each other.
"""
