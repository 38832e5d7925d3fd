"""Which addresses are the internet's: what a client has us connect to may be no other.

Names that clients give are looked up in threads of their own. A name server that never answers holds a thread for half
a minute; the event loop's threads, which the rest of a process needs, are not among them.
"""

import asyncio
import functools
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor

_LOOK_UPS = ThreadPoolExecutor(8, "names-of-clients")

_WAYS_AROUND = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "64:ff9b::/96",  # NAT64 (RFC 6052)
            "64:ff9b:1::/48",  # NAT64 of a network's own (RFC 8215)
            "::/96",  # IPv4-compatible (RFC 4291 2.5.5.1)
            "fec0::/10",  # site-local (RFC 3879)
        ),
    )
)


async def addresses_of(host: str, port: int) -> list[str]:
    """Addresses of a host, each once; OSError or UnicodeError when it has none."""
    look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_LOOK_UPS, look_up)
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


def is_public(address: str) -> bool:
    """True for an address of the internet that cannot be translated to one that is private."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        elif found.sixtofour is not None or found.teredo is not None or any(found in each for each in _WAYS_AROUND):
            return False
    return found.is_global and not found.is_multicast
