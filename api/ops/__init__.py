"""Views and switches for an operator: health, metrics, snapshot, pauses, dead letters, the dashboard.

All figures are read from Redis, so that every api process shows the same ring. Start with `snapshot.py` (the whole
ring at one moment, in the types of `ring_view.py`) and `health.py` (the probes). `metrics.py` with `gauges.py` is the
page for Prometheus; `history_sampler.py` writes `ring_history.py`, the last hour. `pause.py`, `prefix_cache.py`,
`deadletters.py` and `catalogue.py` act on the ring. `ring_address.py` shows joining processes where Redis is,
`server_info.py` answers the clients of other servers. `dashboard/` shows it all to people, as `top` does in a terminal;
`sizes.py` writes numbers of bytes for both.
"""
