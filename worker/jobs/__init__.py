"""The job runner: durable submit-and-poll jobs, advanced by short repeatable ticks (start with tick.py)."""
