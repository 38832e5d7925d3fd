"""Python's garbage collector and what a process has loaded.

A collection looks at every object, and what imports have made are hundreds of thousands that stay. So none runs while
a process imports its parts, which saves an api a fifth of its start; and once it is ready, all that is there is left
out of full collections, which held a worker or an api for 100 to 270 ms, and with it all streams.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Around imports; what is there at their end stays, and no collection looks at it, not even that of the exit.

    The few thousand objects of it that are garbage stay, too: to find them takes a tenth of a second.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def leave_out_what_is_loaded() -> None:
    """Exclude all present objects from later full collections."""
    gc.collect()  # garbage that is left out would stay for ever
    gc.freeze()
