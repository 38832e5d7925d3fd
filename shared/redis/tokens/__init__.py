"""Tokens on their way from a worker to an api process.

`writer.py` is the worker's side: one frame per decode step, and chunks of each sequence's log. On the api's side
`reader.py` has the subscription and `feed.py` gives one request its events in order, without a gap. `log.py` reads what
was missed.
"""
