"""The network as a process of ours meets it: this machine's addresses, another one's in order, and macOS's privacy.

A name such as mac-1.local often resolves to a link-local IPv6 address first, which is of one interface alone and does
not reach the host over another one. macOS's Local Network privacy shows as "No route to host" where there is a route.
"""

import errno
import re
import socket
import sys
from collections.abc import Sequence
from typing import Any

from shared.machine.commands import output_of

Info = tuple[int, int, int, str, tuple[Any, ...]]  # as getaddrinfo gives it

HINT = (
    "macOS refuses programs it has not been allowed to reach the local network: allow this one (or the terminal that "
    "starts it) in System Settings, Privacy & Security, Local Network; for launchd, take the LaunchDaemons of "
    "deploy/launchd"
)
_INET = re.compile(r"^\s+inet6? ([0-9a-fA-F.:]+)", re.MULTILINE)
_LOOPBACK = ("127.", "::1")


def in_order(found: Sequence[Info]) -> list[Info]:
    """Addresses to try, the best first: IPv4, then IPv6; link-local ones only where there is nothing else."""
    reaching = [each for each in found if not _is_link_local(each)]
    return sorted(reaching or found, key=lambda each: each[0] != socket.AF_INET)


def _is_link_local(info: Info) -> bool:
    return info[0] == socket.AF_INET6 and str(info[4][0]).lower().startswith("fe80:")


def interface_addresses() -> set[str]:
    """Addresses by which other machines may know this one; empty where the system does not list them."""
    if sys.platform != "darwin":
        return set()
    return addresses_in(output_of("/sbin/ifconfig", "-a"))


def addresses_in(ifconfig: str) -> set[str]:
    """Addresses in the text of ifconfig(8); no loopback and no IPv6 link-local ones, which all machines have."""
    found = (match[1] for match in _INET.finditer(ifconfig))
    return {each for each in found if not each.startswith(_LOOPBACK) and not each.lower().startswith("fe80:")}


def words_of(error: OSError, text: str) -> str:
    """The text of an error, with what to do where macOS's privacy may be its cause."""
    return f"{text} ({HINT})" if sys.platform == "darwin" and error.errno == errno.EHOSTUNREACH else text
