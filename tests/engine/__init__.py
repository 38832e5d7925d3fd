"""The engine on small models. BLAS is replaced before mlx is first imported, as in a worker."""

from worker.engine import fast_blas

fast_blas.install()
