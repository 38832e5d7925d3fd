"""Checks of what clients send that may take long, crash a library or reach into a network.

Such work stays off the event loop. `grammars.py` compiles grammars and `image_intake.py` decodes images, each in
processes that can be killed (`grammar_process.py`, `shared/image_files/`); `body_readers.py` reads long bodies in
others (`body_process.py`). `image_fetch.py` fetches images from hosts that the operator has named, where
`public_addresses.py` says that the address is one of the internet's.
"""
