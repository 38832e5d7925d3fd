"""This api process's connection to the ring: Redis, the served models, the token frames that come back.

`ring.py` first: `Ring` is what every route gets (`ring_of`), and lives as long as the process.

`choosing.py` says which of several rings a request is about: its model's, or that of the thing that it names;
`spreading.py` which one gets it where several serve the same model.

`split_choices.py` chooses the version of an adapter whose requests are split over several.

`cold_models.py` says where the models of the catalogue stand, and why a host cannot load one.
`first_tokens.py` predicts when a request's first token would come, so that it can be refused in time.
`ordered_scores.py` has a job runner score texts; `stored_sessions.py` finds a session of live traffic.
"""
