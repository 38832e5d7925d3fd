"""Limit of open files of a process: each stream of an api and each connection to Redis is one.

A process takes as many as the system allows, up to FILES. mlx_lm sets both limits to a few thousand as it is imported,
and the hard one never rises again, except for root: so it is kept from doing that.
"""

import contextlib
import resource
from collections.abc import Iterator

FILES = 65_536  # wanted


def raise_file_limit() -> int:
    """Allow this process as many open files as it may have, up to FILES; returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    while wanted > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
        except (ValueError, OSError):  # macOS: the kernel allows fewer than the hard limit (kern.maxfilesperproc)
            wanted //= 2
    return soft


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """Around the first import of mlx_lm: it changes no limit of open files; at the end ours is raised."""
    theirs = resource.setrlimit

    def setrlimit(kind: int, limits: tuple[int, int], /) -> None:
        if kind != resource.RLIMIT_NOFILE:
            theirs(kind, limits)

    resource.setrlimit = setrlimit
    try:
        yield
    finally:
        resource.setrlimit = theirs
    raise_file_limit()
