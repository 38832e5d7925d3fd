"""The engine on small models. BLAS is replaced before mlx is first imported, as in a worker."""

import os

from mlx_model import fast_blas

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # CUDA: TF32's rounding depends on the batch, fp32's hardly does
fast_blas.install()
