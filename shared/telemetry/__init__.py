"""Metrics and traces of a process's work.

`metrics.py` is the catalogue of all metrics, and the tally that each process keeps. `tracing.py` opens spans;
`spans.py` is their plain data, and `opentelemetry.py` is imported only while traces are on.
"""
