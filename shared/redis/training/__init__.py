"""Data that passes between the ring and a trainer.

`trajectory_intake.py`: finished live traffic that nobody has scored yet. `trajectory_queue.py`: scored trajectories,
which the trainer takes exactly once. `orders.py`: what users ask of a trainer (or of a job runner), and the answers.
`board.py`: what the trainer tells of itself.
`learner_store.py`: learners of the training service, their requests, answers, states and saves.
`shared_runs.py`: runs whose train steps several processes share. `rounds.py`: runs that average their weights.
`presence.py`: who takes part in either and lives. `parcels.py`: bytes of weights and gradients, of all of these.
`tinker_store.py`: what clients of Tinker's protocol have besides: sessions, samplers, samples.
"""
