"""Networks that are no language models: many rows of one version in one forward, in short pieces.

`network.py` reads one and computes it in fp32. Which rows go together, and when:
`batch/network_run.py`; where the weights come from: `lora/reader.py`.
"""
