"""MLX's side of a group: where its ranks listen, and how they connect. In thread G, after all ranks have met."""

import json
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_model import cuda_graphs
from mlx_model.collectives.cuda import sums
from ranks.placement import Backend, Host, Placement, RankSettings, address_of, with_port
from shared.errors import ServiceUnavailableError, SetupError
from shared.process.worker_settings import WorkerSettings
from shared.redis.connection.address import own_address

LONGEST_WAIT_US = 1000  # Linux makes up to two ticks of its clock of it, so 8 ms


def backend_of(placed: Placement) -> Backend:
    """The one that is used; SetupError when this MLX does not have it."""
    on_gpu = mx.default_device() != mx.Device(mx.cpu)
    backend: Backend = placed.backend or ("nccl" if on_gpu and mx.distributed.is_available("nccl") else "ring")
    if not mx.distributed.is_available(backend):
        raise SetupError(
            f"--distributed-mode {backend}: MLX {metadata.version('mlx')} on this machine does not have it"
        )
    return backend


def listens_at(settings: RankSettings, placed: Placement) -> str:
    """The address at which the other ranks reach this one."""
    if placed.is_local:
        return "127.0.0.1"
    given = placed.hosts[placed.rank].addresses
    if given:
        return address_of(given[0])
    return own_address(settings.redis, settings.kv_transfer_host if isinstance(settings, WorkerSettings) else "")


def own_places(placed: Placement, backend: Backend, address: str) -> list[str]:
    """Where this rank listens for the others, as IP:PORT; ports that are not given are free ones."""
    host = placed.hosts[placed.rank] if placed.hosts else Host()
    if backend == "nccl" and placed.rank:
        return []  # rank 0 alone listens
    given = host.addresses or (address,)
    given = given if backend == "ring" else given[:1]
    return [each if address_of(each) != each else _with_port(each) for each in given]


def _with_port(address: str) -> str:
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((address, 0), family=family) as probe:
        port = probe.getsockname()[1]
    return with_port(address, port)


def join(placed: Placement, backend: str, places: Sequence[Sequence[str]], options: "Jaccl") -> Any:
    """Connect to the other ranks, and wait for them; ServiceUnavailableError when MLX cannot."""
    variables = {"MLX_RANK": str(placed.rank), "MLX_WORLD_SIZE": str(placed.size)}
    if backend == "ring":
        variables["MLX_HOSTFILE"] = _file([list(each) for each in places])
    elif backend == "nccl":
        host, _, port = places[0][0].rpartition(":")
        variables |= {"NCCL_HOST_IP": host.strip("[]"), "NCCL_PORT": port}
    else:
        variables |= options.variables(placed, places)
    cuda_graphs.prepare(sums=True)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        group = mx.distributed.init(strict=True, backend=backend)
    except Exception as error:  # one has died meanwhile, say
        raise ServiceUnavailableError(
            f"the ranks cannot connect by {backend}: {type(error).__name__}: {error}"
        ) from error
    finally:  # mlx.launch has set them, too, and a process that begins anew reads them again
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        if "MLX_HOSTFILE" in variables:
            Path(variables["MLX_HOSTFILE"]).unlink()
    if (group.rank(), group.size()) != (placed.rank, placed.size):
        raise SetupError(
            f"{backend} says rank {group.rank()} of {group.size()}, and not {placed.rank} of {placed.size}"
        )
    if backend == "ring" and mx.default_device() == mx.Device(mx.cpu):
        let_sockets_wait(places, placed.rank)
    if backend == "nccl":
        sums.open_to(group)
    return group


def let_sockets_wait(places: Sequence[Sequence[str]], rank: int) -> None:
    """Let this rank's sockets of the ring wait for what comes: MLX asks them without a pause, which takes a core.

    For ranks that compute on their CPUs. MLX's thread of a socket receives first and then sends, so where a socket has
    both to do, as for sums of 1 MB and more, it may send late by as much as it waits.
    """
    own, next_ = _ports(places[rank]), _ports(places[(rank + 1) % len(places)])
    for number in [int(file.name) for file in Path("/dev/fd").iterdir()]:
        if not _is_socket(number):
            continue
        with socket.socket(fileno=os.dup(number)) as twin:
            if twin.family == socket.AF_INET and (twin.getsockname()[1] in own or _peer(twin) in next_):
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    twin.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, LONGEST_WAIT_US))
                twin.setblocking(True)  # and with it MLX's, which is the same one


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:  # closed by now, as the folder itself is
        return False


def _ports(places: Sequence[str]) -> set[int]:
    return {int(place.rpartition(":")[2]) for place in places}


def _peer(connected: socket.socket) -> int:
    try:
        return int(connected.getpeername()[1])
    except OSError:  # it listens
        return 0


class Jaccl:
    """RDMA through MLX, configured by our flags or by mlx.launch. It has never run on RDMA hardware."""

    def __init__(self, ibv_devices: str, coordinator: str) -> None:
        self._devices = ibv_devices or os.environ.get("MLX_IBV_DEVICES", "")
        self._coordinator = coordinator or os.environ.get("MLX_JACCL_COORDINATOR", "")

    def check(self, placed: Placement) -> None:
        """SetupError for what is missing."""
        if not self._devices and not all(host.devices for host in placed.hosts):
            raise SetupError(
                "--distributed-mode jaccl needs RDMA devices: --distributed-ibv-devices FILE, or `rdma` in the file of "
                "machines (mlx.distributed_config writes it)"
            )
        if self._devices and not Path(self._devices).is_file():
            raise SetupError(f"--distributed-ibv-devices {self._devices}: no such file")

    def variables(self, placed: Placement, places: Sequence[Sequence[str]]) -> dict[str, str]:
        """Environment variables that MLX reads."""
        devices = self._devices or _file([list(host.devices) for host in placed.hosts])
        return {"MLX_IBV_DEVICES": devices, "MLX_JACCL_COORDINATOR": self._coordinator or places[0][0]}


def _file(content: object) -> str:
    """A file that MLX reads at once."""
    handle, path = tempfile.mkstemp(prefix="parallm-ranks-", suffix=".json")
    with os.fdopen(handle, "w") as file:
        json.dump(content, file)
    return path
