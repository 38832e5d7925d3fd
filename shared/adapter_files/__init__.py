"""Adapter directories of mlx-lm and PEFT, read without MLX and without trust.

`formats.py` first: from a directory to one checked file in mlx-lm's layout. `config.py` reads `adapter_config.json`,
`heads.py` checks heads, `reach.py` how large numbers get, `tensors.py` reads and
writes safetensors. `export.py` goes the other way, to either layout.
"""
