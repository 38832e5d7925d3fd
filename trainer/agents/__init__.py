"""Several policies that learn at once in one process: `mlx_parallm_train --agents FILE`.

`team.py` reads the file, `runs.py` runs what it says.
"""
