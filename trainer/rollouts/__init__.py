"""From prompts to scored groups of samples.

Read in this order: `groups.py` (the types, who generates, and who brings groups), `collector.py` (keeps groups coming)
with `pacing.py` (how far ahead of training), `episodes.py` (one group from start to end),
`conversation.py` (token ids turn by turn), `environments.py` (tasks), `scorers.py`
(rewards of data sets), `held_out.py` (what a run is measured on) and `shown.py` (samples for people to read).

`teaching.py` has samples scored by a teacher. `agents/` makes environments of programs that ask a model.

Other sources: `live.py` (live traffic), `atropos.py` (Atropos' run-api). `own/` runs code of the user's own in a
process that can be killed.

Which task a new group is of: `curriculum.py` (draws, and books that a checkpoint stores), `curriculum_settings.py`,
`task_pool.py` (what each task has earned), `difficulty.py` and `task_places.py` (how hard tasks are). `cart_pole.py` is
an environment of ours. Images of prompts: `pictures.py`, `picture_shelf.py`, `sight.py`.
"""
