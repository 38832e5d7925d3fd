"""The model in MLX's arrays, as a worker serves it and as a trainer learns it.

`loader.py` first, with its settings (`config.py`); `hub.py` fetches a model. `batching.py` says which models run in a
batch, `mended.py` and `padded.py` help some to do so, `borrowed.py` has models of mlx-vlm; `sites.py` says where a
model can be adapted, `routing.py` which experts a token goes to, `pooling.py` makes embeddings, `draft.py` says which
other model may draft for it. `step/` is the decode step of some families with few operations, `joined.py` makes one
product of several. Among several ranks `sharding.py` cuts out a rank's part of each layer, on which `learning.py` lets
LoRA learn, and `pipeline.py` a rank's layers; `chain.py` says where. Back ends: `device.py` says which one computes,
`tuned.py` what was measured on it, `memory.py` what it may hold; `fast_blas.py` with `fast_blas.c` (Linux CPU),
`cuda_graphs.py` (CUDA).

Rooms: `kv/` (keys and values of every kind of layer), `lora/` (layers with adapters), `heads/` (small networks on
hidden states), `networks/` (those that are no language models), `vision/` (towers), `sampling/` (drawing a token),
`collectives/` (what ranks exchange within a forward), `cuda/` and `metal/` (what our kernels share). Which rows compute
together is decided in worker/engine/, what is learned in trainer/learn/.
"""
