"""Addresses of all of this machine's interfaces, Thunderbolt bridges included, which no default route leads to."""

import re
import sys

from shared.machine.commands import output_of

_INET = re.compile(r"^\s+inet6? ([0-9a-fA-F.:]+)", re.MULTILINE)
_LOOPBACK = ("127.", "::1")


def interface_addresses() -> set[str]:
    """Addresses by which other machines may know this one; empty where the system does not list them."""
    if sys.platform != "darwin":
        return set()
    return addresses_in(output_of("/sbin/ifconfig", "-a"))


def addresses_in(ifconfig: str) -> set[str]:
    """Addresses in the text of ifconfig(8); no loopback and no IPv6 link-local ones, which all machines have."""
    found = (match[1] for match in _INET.finditer(ifconfig))
    return {each for each in found if not each.startswith(_LOOPBACK) and not each.lower().startswith("fe80:")}
