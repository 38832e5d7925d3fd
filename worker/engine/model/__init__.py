"""The model itself: loading it, and what differs between architectures and back ends.

`loader.py` first. `batching.py` says which models run in a batch, `sites.py` where a model can be adapted, `pooling.py`
makes embeddings, `draft.py` says which other model may draft for it. `step/` is the decode step of some families with
few operations, `joined.py` makes one product of several, and `cuda/` has kernels for both. Among several ranks
`sharding.py` cuts out a rank's part of each layer, on which `learning.py` lets LoRA learn, and `pipeline.py` a rank's
layers; `chain.py` says where. Back ends: `fast_blas.py` with `fast_blas.c` (Linux CPU), `cuda_graphs.py` (CUDA).
"""
