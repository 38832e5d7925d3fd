"""Python's garbage collector and what a process has loaded.

A full collection looks at every object, and what imports have made are hundreds of thousands: it held a worker or an
api for 100 to 270 ms, and with it all streams. So once a process is ready, all that is there is left out of it.
"""

import gc


def leave_out_what_is_loaded() -> None:
    """From now on full collections look only at objects made after this call."""
    gc.collect()  # garbage that is left out would stay for ever
    gc.freeze()
