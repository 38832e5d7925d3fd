"""Checks of ports, of the firewall, and of the ring's Redis."""

import asyncio
import errno
import socket
from collections.abc import Iterator

from api.doctor.finding import Finding, note, ok, wrong
from shared.errors import ParallmError
from shared.machine.commands import output_of
from shared.machine.network import HINT
from shared.machine.system import System, version_numbers
from shared.redis.connection.client import require
from shared.redis.server_binary import find_binary

FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
LOCAL_NETWORK_FROM = (15,)  # macOS asks the user before a program may reach other machines nearby
WAIT_S = 5.0


def network_checks(system: System, redis: str, host: str, port: int) -> Iterator[Finding]:
    """All checks of the network. `redis`: the ring's address, "" for the embedded one."""
    yield port_check(host, port)
    if system.platform == "darwin":
        yield firewall_check(output_of(FIREWALL, "--getglobalstate"))
    yield redis_check(system, redis) if redis else embedded_check()


def port_check(host: str, port: int) -> Finding:
    """The port of `mlx_parallm_serve` is free."""
    try:
        with socket.create_server((host, port)):
            return ok("port", f"{host}:{port} is free")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return note("port", f"another program listens at {host}:{port}", "stop it, or give --port another number")
        return wrong("port", f"{host}:{port}: {error.strerror}", "give --host an address of this machine")


def firewall_check(state: str) -> Finding:
    """macOS's firewall, from the text of `socketfilterfw --getglobalstate`."""
    if "State = 0" in state or "disabled" in state:
        return ok("firewall", "off")
    if not state:
        return note("firewall", "its state could not be read")
    return note(
        "firewall",
        "on: other machines may not reach a server here",
        f"sudo {FIREWALL} --add PYTHON; sudo {FIREWALL} --unblockapp PYTHON, with the path of this Python",
    )


def embedded_check() -> Finding:
    """A Redis server that `mlx_parallm_serve` can start."""
    try:
        return ok("redis", f"embedded: {find_binary()}")
    except ParallmError as error:
        return wrong("redis", "there is no server to embed", str(error))


def redis_check(system: System, url: str) -> Finding:
    """The ring's Redis answers, and has what a ring needs."""
    try:
        asyncio.run(require(url, WAIT_S))
    except (ParallmError, OSError) as error:
        if _is_blocked(system, error):
            return wrong("redis", str(error), HINT)
        return wrong("redis", str(error), "start it, and check host, port, password and the firewall of its machine")
    return ok("redis", "it answers, and has what a ring needs")


def _is_blocked(system: System, error: Exception) -> bool:
    if system.platform != "darwin" or version_numbers(system.version) < LOCAL_NETWORK_FROM:
        return False
    causes = [error, error.__cause__, error.__context__]
    said = any("No route to host" in str(cause) or "[Errno 65]" in str(cause) for cause in causes)
    return said or any(isinstance(cause, OSError) and cause.errno == 65 for cause in causes)
