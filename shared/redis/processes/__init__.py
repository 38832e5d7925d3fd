"""State that the processes of a ring share about each other.

`worker_registry.py`: who serves what, with heartbeats. `ring_secret.py`: how they know one another. `shared_look.py`:
one look of one process for many. `pause.py`: the switch that stops all workers. `metric_store.py`: the sum
of what all processes have counted. `child_troubles.py`: child processes that end again and again.
`completion_store.py`: completions that workers draft from. `catalogue.py`: the models that the ring may serve, and the
hosts that load them.
"""
