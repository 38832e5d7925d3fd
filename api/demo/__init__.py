"""The program of `make demo`: the whole ring on this machine with the tiny model, seen through its own clients.

`__main__.py` is the order of the acts: `chats.py` and two jobs with `report.py`, then `adapters.py`, `pictures.py` and
`learning.py` with `curves.py`. `serving.py` starts the ring, `prompts.py` has what is asked.

`real.py` is what `make real` runs: a shorter list, with a real model.
"""
