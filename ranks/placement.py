"""Which rank of which group this process is, by its settings and by what mlx.launch has put into its environment."""

import contextlib
import hashlib
import json
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from shared.errors import SetupError
from shared.machine.network import interface_addresses
from shared.process.model_aliases import short_name
from shared.process.worker_settings import WorkerSettings

# One of these tells how many ranks mlx.launch has started: of the ring, of nccl, of jaccl.
_OF_LAUNCH = ("MLX_HOSTFILE", "MLX_WORLD_SIZE", "MLX_IBV_DEVICES")

Backend = Literal["", "ring", "nccl", "jaccl"]
Kind = Literal["worker", "trainer"]
_ALLOWED_ENVS = ("MLX_", "METAL_", "NCCL_", "MTL_")


class RankSettings(Protocol):
    """Settings of a process that may be one of several ranks: a worker or a trainer."""

    @property
    def model(self) -> str: ...

    @property
    def redis(self) -> str: ...

    @property
    def memory_limit_bytes(self) -> int: ...

    @property
    def num_local_ranks(self) -> int: ...

    @property
    def distributed_mode(self) -> str: ...

    @property
    def distributed_sharding(self) -> str: ...

    @property
    def distributed_hostfile(self) -> str: ...

    @property
    def distributed_rank(self) -> int: ...

    @property
    def distributed_group(self) -> str: ...

    @property
    def distributed_ibv_devices(self) -> str: ...

    @property
    def distributed_jaccl_coordinator(self) -> str: ...

    @property
    def distributed_silence_s(self) -> float: ...

    @property
    def distributed_turn_s(self) -> float: ...

    def environment(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class Host:
    """The machine of one rank."""

    name: str = ""  # for ssh, or an address
    addresses: tuple[str, ...] = ()  # IP, or IP:PORT where the port to listen on is given
    devices: tuple[Any, ...] = ()  # of RDMA, by the rank that they lead to


@dataclass(frozen=True)
class Placement:
    """Place of this process in its group."""

    group: str  # by which its ranks find one another in Redis
    rank: int
    size: int
    backend: Backend  # "": nccl where there are GPUs of NVIDIA, else ring
    is_local: bool  # all ranks are on this machine, and rank 0 starts the others
    hosts: tuple[Host, ...] = ()  # in order of rank; () where all are local
    kind: Kind = "worker"  # of process, and the name of its package


def placement(settings: WorkerSettings, environment: Mapping[str, str] = os.environ) -> Placement | None:
    """None: this worker is no group. SetupError names what contradicts something, or cannot be."""
    served = settings.served_model_name or short_name(settings.model)
    placed = place(settings, "worker", served, environment)
    if placed is not None:
        _check(settings)
    return placed


def place(
    settings: RankSettings, kind: Kind, name: str, environment: Mapping[str, str] = os.environ
) -> Placement | None:
    """Placement of a process; None: it is alone. `name` distinguishes its group from others on the same machines."""
    launched = "MLX_RANK" in environment and any(name in environment for name in _OF_LAUNCH)
    named = settings.distributed_hostfile
    asks = settings.num_local_ranks > 1 or bool(named)
    if settings.distributed_mode == "off":
        if asks:
            flag = "--distributed-hostfile" if named else "--num-local-ranks"
            raise SetupError(f"--distributed-mode off contradicts {flag}")
        return None
    if not (asks or launched):
        flags = {
            f"--distributed-mode {settings.distributed_mode}": bool(settings.distributed_mode),
            f"--distributed-sharding {settings.distributed_sharding}": settings.distributed_sharding != "tensor",
        }
        if flag := next((flag for flag, is_given in flags.items() if is_given), ""):
            raise SetupError(
                f"{flag} needs ranks: --num-local-ranks N for this machine, --distributed-hostfile FILE for several, "
                "or mlx.launch"
            )
        return None
    if settings.num_local_ranks > 1:
        if named or launched:
            other = "--distributed-hostfile" if named else "mlx.launch"
            raise SetupError(f"--num-local-ranks is for one machine, {other} says who the ranks are: leave one out")
        return _local(settings, kind)
    hosts, backend = _hosts(settings, environment)
    given = settings.distributed_mode or backend
    rank = _rank(settings, environment, hosts)
    group = settings.distributed_group or _name(kind, name, hosts)
    return Placement(group, rank, len(hosts), _known(given), False, hosts, kind)


def _local(settings: RankSettings, kind: Kind) -> Placement:
    if settings.distributed_mode == "jaccl":
        raise SetupError("--distributed-mode jaccl is for several machines: --distributed-hostfile, or mlx.launch")
    rank = max(0, settings.distributed_rank)
    if rank and not settings.distributed_group:
        raise SetupError("rank 0 starts the other ranks of a machine: leave --distributed-rank out")
    group = settings.distributed_group or uuid.uuid4().hex
    return Placement(group, rank, settings.num_local_ranks, _known(settings.distributed_mode), True, (), kind)


def _check(settings: WorkerSettings) -> None:
    """Refuse settings that a group does not support."""
    part = "a rank's KV is a part of the model's"
    refused = {
        f"--spec-decode {settings.spec_decode}": (
            settings.spec_decode in ("draft", "auto"),
            "ngram is what all ranks draft alike",
        ),
        f"--guest with --distributed-sharding {settings.distributed_sharding}": (
            bool(settings.guest) and settings.distributed_sharding == "pipeline",
            "a model that ranks hold layer by layer cannot learn",
        ),
        "--distributed-sharding data": (
            settings.distributed_sharding == "data",
            "its ranks hold a model together; a trainer's ranks may each have all of it (mlx_parallm_train)",
        ),
        "--ssd-cache-dir": (settings.ssd_folder is not None, f"{part}, and files are whole"),
        "--kv-transfer": (settings.kv_transfer, f"{part}, and workers give it whole"),
    }
    for flag, (asked, why) in refused.items():
        if asked:
            raise SetupError(f"{flag} cannot be had by a worker of several ranks: {why}")


def _known(mode: str) -> Backend:
    if mode not in ("", "ring", "nccl", "jaccl"):
        raise SetupError(f"--distributed-mode {mode}: one of ring, nccl, jaccl")
    return mode  # type: ignore[return-value]


def _hosts(settings: RankSettings, environment: Mapping[str, str]) -> tuple[tuple[Host, ...], str]:
    """In order of rank, and the backend that the file or mlx.launch names."""
    named = settings.distributed_hostfile or environment.get("MLX_HOSTFILE", "")
    if named:
        hosts, backend = read_hosts(Path(named))
        return hosts, backend
    if "MLX_WORLD_SIZE" not in environment:
        return _of_jaccl(environment), "jaccl"
    size = environment["MLX_WORLD_SIZE"]
    if not size.isdigit() or "NCCL_HOST_IP" not in environment:
        raise SetupError("MLX_WORLD_SIZE is a number, and NCCL_HOST_IP rank 0's address, where mlx.launch sets them")
    first = Host(addresses=(environment["NCCL_HOST_IP"],))
    return (first, *[Host()] * (int(size) - 1)), "nccl"


def _of_jaccl(environment: Mapping[str, str]) -> tuple[Host, ...]:
    """The ranks of jaccl, as mlx.launch says: their RDMA devices, row by row, and where rank 0 listens."""
    file = environment["MLX_IBV_DEVICES"]
    try:
        rows = json.loads(Path(file).read_bytes())
        devices = [tuple(row) for row in rows]
    except (OSError, ValueError, TypeError) as error:
        raise SetupError(f"MLX_IBV_DEVICES {file}: no row of RDMA devices for each rank: {error}") from error
    if len(devices) < 2:
        raise SetupError(f"MLX_IBV_DEVICES {file} has {len(devices)} rows; a group has two ranks or more")
    first = environment.get("MLX_JACCL_COORDINATOR", "")
    if not first:
        raise SetupError("MLX_JACCL_COORDINATOR is rank 0's HOST:PORT, where mlx.launch sets it")
    return (Host(addresses=(first,), devices=devices[0]), *[Host(devices=row) for row in devices[1:]])


def file_environment(settings: RankSettings) -> dict[str, str]:
    """Variables that the file of machines gives to every rank (`envs`, as mlx.launch sets them); {} without one."""
    if not settings.distributed_hostfile:
        return {}
    try:
        given = json.loads(Path(settings.distributed_hostfile).read_bytes())
    except (OSError, ValueError):
        return {}  # `read_hosts` says what is wrong
    listed = given.get("envs") or [] if isinstance(given, dict) else []
    is_ring_of_jaccl = isinstance(given, dict) and given.get("backend") == "jaccl-ring"
    variables = {"MLX_JACCL_RING": "1"} if is_ring_of_jaccl else {}
    for each in listed:
        name, equals, value = each.partition("=") if isinstance(each, str) else ("", "", "")
        if not equals or not name.startswith(_ALLOWED_ENVS):
            raise SetupError(
                f"--distributed-hostfile {settings.distributed_hostfile}: envs are NAME=VALUE of MLX, Metal or NCCL; "
                f"{each!r} is none"
            )
        variables[name] = value
    return variables


def read_hosts(file: Path) -> tuple[tuple[Host, ...], str]:
    """A file as mlx.launch takes it, or as it writes it for the ring; SetupError when it is neither."""
    try:
        given = json.loads(file.read_bytes())
    except OSError as error:
        raise SetupError(f"--distributed-hostfile {file}: {error.strerror}") from error
    except ValueError as error:
        raise SetupError(f"--distributed-hostfile {file} is not JSON: {error}") from error
    backend = str(given.get("backend", "")) if isinstance(given, dict) else ""
    listed: Any = given.get("hosts") if isinstance(given, dict) else given
    try:
        hosts = tuple(map(_host, listed))
    except (TypeError, KeyError, AttributeError) as error:
        raise SetupError(
            f'--distributed-hostfile {file}: a list of machines, each as {{"ssh": "name", "ips": ["10.0.0.1"]}} or, '
            'for the ring, as ["10.0.0.1:5000"]'
        ) from error
    if len(hosts) < 2:
        raise SetupError(f"--distributed-hostfile {file} names {len(hosts)} machines; a group has two or more")
    return hosts, backend.removesuffix("-ring")


def _host(given: Any) -> Host:
    if isinstance(given, list):
        return Host(addresses=tuple(map(_text, given)))
    return Host(_text(given["ssh"]), tuple(map(_text, given.get("ips") or ())), tuple(given.get("rdma") or ()))


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError("an address is a text")
    return given


def _rank(settings: RankSettings, environment: Mapping[str, str], hosts: Sequence[Host]) -> int:
    given = environment.get("MLX_RANK", "")
    rank = settings.distributed_rank if settings.distributed_rank >= 0 else int(given) if given.isdigit() else -1
    if rank >= len(hosts):
        raise SetupError(f"rank {rank} of {len(hosts)}: the file of machines names fewer")
    if rank >= 0:
        return rank
    ours = own_names()
    found = [at for at, host in enumerate(hosts) if ours.intersection((host.name, *map(address_of, host.addresses)))]
    if len(found) != 1:
        several = f"ranks {', '.join(map(str, found))} are" if found else "none of its ranks is"
        raise SetupError(f"{several} this machine, by the file of machines: say --distributed-rank N")
    return found[0]


def own_names() -> set[str]:
    """Names and addresses of this machine, as far as they can be known."""
    name = socket.gethostname()
    names = {name, name.split(".")[0], *interface_addresses()}
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError):  # macOS may not resolve a machine's own name
            names.update(str(each[4][0]) for each in socket.getaddrinfo(name, None, family))
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing; the address that would be used
            names.add(str(probe.getsockname()[0]))
    return names


def address_of(given: str) -> str:
    """Without the port, if there is one."""
    host, colon, port = given.rpartition(":")
    return host.strip("[]") if colon and port.isdigit() and (":" not in host or host.endswith("]")) else given


def with_port(address: str, port: int) -> str:
    """As it is written down: HOST:PORT."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _name(kind: Kind, name: str, hosts: Sequence[Host]) -> str:
    """The same on all machines of a file."""
    facts: list[Any] = [[host.name, *host.addresses] for host in hosts]
    of = [name] if kind == "worker" else [name, kind]
    return hashlib.blake2b(json.dumps([facts, *of]).encode(), digest_size=12).hexdigest()


def own_device(placed: Placement, visible: str) -> str:
    """CUDA_VISIBLE_DEVICES of this rank, where all ranks are on one machine: one device each of those; "": of all."""
    devices = visible.split(",") if visible else []
    return devices[placed.rank] if placed.rank < len(devices) else str(placed.rank)
