"""This api process's connection to the ring: Redis, the served models, the token frames that come back.

`ring.py` first: `Ring` is what every route gets (`ring_of`), and lives as long as the process.

Work whose time depends on what a client sent stays off the event loop: `room.py` shares a few threads fairly between
API keys (`caller.py` says whose work a task does), `grammars.py` checks grammars in processes that can be killed
(`grammar_process.py`), `body_readers.py` reads long bodies in others (`body_process.py`), and `ordered_scores.py` asks
a job runner for rewards.

Images are checked in such processes, too (`images.py`); `named_images.py` reads those that a request names, and
`image_fetch.py` fetches them from hosts that the operator has named, where `public_addresses.py` says that the address
is one of the internet's.

`choosing.py` says which of several rings a request is about: its model's, or that of the thing that it names;
`spreading.py` which one gets it where several serve the same model.

`split_choices.py` chooses the version of an adapter whose requests are split over several.

`first_tokens.py` predicts when a request's first token would come, so that it can be refused in time.
"""
