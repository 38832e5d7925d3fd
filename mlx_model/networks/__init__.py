"""Networks that are no language models: many rows of one version in one forward, in short pieces.

`network.py` reads one and computes it in fp32. Which rows go together, and when:
worker/engine/batch/network_run.py; where the weights come from: mlx_model/lora/reader.py.
"""
