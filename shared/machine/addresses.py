"""Which of a host's addresses to try, and in which order.

A name such as mac-1.local often resolves to a link-local IPv6 address first, which is of one interface alone and does
not reach the host over another one.
"""

import socket
from collections.abc import Sequence
from typing import Any

Info = tuple[int, int, int, str, tuple[Any, ...]]  # as getaddrinfo gives it


def in_order(found: Sequence[Info]) -> list[Info]:
    """Addresses to try, the best first: IPv4, then IPv6; link-local ones only where there is nothing else."""
    reaching = [each for each in found if not _is_link_local(each)]
    return sorted(reaching or found, key=lambda each: each[0] != socket.AF_INET)


def _is_link_local(info: Info) -> bool:
    return info[0] == socket.AF_INET6 and str(info[4][0]).lower().startswith("fe80:")
