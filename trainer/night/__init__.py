"""Night school: `mlx_parallm_serve --learn-when ...` learns at night from what its users did by day.

`school.py` decides when a run begins, goes on and ends; the run itself is `--mode distill --dataset sessions:POLICY`
(trainer/runs/distillation/), whose versions stay candidates. `morning.py` makes the report of a run's folder.
`__main__.py` is the child process of `mlx_parallm_serve`; `trainer/recipes/night.yaml` has the settings of a night.
"""
