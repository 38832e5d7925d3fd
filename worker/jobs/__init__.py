"""The job runner: durable jobs, advanced by short ticks that may be repeated.

Read in this order: `tick.py` (the story), `work.py` (one job in one tick), `expansion.py` (prompts to sequences),
`rewarding.py` and `outcomes.py` (results to rewards to result lines). `runner.py` is the process (`__main__.py` starts
it), `context.py` what its ticks share. Besides jobs it does more: `collecting.py` scores live traffic for trainers, or
keeps it for feedback; `judging.py` labels what users write next; `verdicts.py` gives trainers what was judged;
`scores.py` scores texts for the api at once.
"""
