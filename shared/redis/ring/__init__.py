"""What the processes of a ring know of each other.

`worker_registry.py`: who serves what, with heartbeats. `shared_look.py`: what one process sees for many. `pause.py`:
the switch that stops all workers. `metric_store.py`: the sum of what all processes have counted. `child_troubles.py`:
child processes that end again and again. `completion_store.py`: what sequences have written, which workers draft from.
"""
