"""The slot of a cluster that a command goes to. Plain data, no connection.

The names in shared/redis/keys.py say what belongs together: what stands in braces decides the slot. A channel with
braces in its name is a sharded one: its messages stay on the servers of its slot. Others reach every server.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from redis.crc import key_slot

Command = tuple[Any, ...]
Place = TypeVar("Place", bound=Hashable)

SLOTS = 16_384
SPREAD = frozenset({"DEL", "UNLINK", "EXISTS", "TOUCH", "MGET"})  # may name keys of several slots
EVERYWHERE = frozenset({"SCRIPT LOAD", "SCRIPT FLUSH", "FLUSHALL"})
_WITHOUT_KEY = frozenset(
    {"ASKING", "AUTH", "CLIENT", "CLUSTER", "CONFIG", "DBSIZE", "FLUSHALL", "INFO", "PING", "PUBSUB"}
)
_WITHOUT_KEY |= {"SCRIPT", "SLOWLOG", "TIME"}
_TWO_WORDS = frozenset({"MEMORY", "OBJECT", "XGROUP", "XINFO"})


def slot_of(key: object) -> int:
    """The slot of a key or a sharded channel."""
    return key_slot(key if isinstance(key, bytes) else str(key).encode())


def is_sharded(channel: object) -> bool:
    """True if the channel's name has a hash tag, so that it belongs to a slot."""
    name = channel.decode(errors="replace") if isinstance(channel, bytes) else str(channel)
    return 0 <= name.find("{") < name.find("}") - 1


def name_of(command: Sequence[Any]) -> str:
    """The command's name in capitals, with its second word where redis-py gives both as one."""
    name = command[0]
    return (name.decode() if isinstance(name, bytes) else str(name)).upper()


def keys_of(command: Sequence[Any]) -> Sequence[Any]:
    """The keys of a command by which its server is found: at least the first one; none when any server will do."""
    name = name_of(command)
    word = name.partition(" ")[0]
    if word in _WITHOUT_KEY:
        return ()
    if name in ("EVAL", "EVALSHA"):
        return command[3 : 3 + int(command[2])]
    if name in ("XREAD", "XREADGROUP"):
        streams = _after_streams(command)
        return streams[: len(streams) // 2]
    if name in SPREAD:
        return command[1:]
    return command[2:3] if name in _TWO_WORDS else command[1:2]


def waits_s(command: Sequence[Any]) -> float:
    """Seconds that a command may wait at its server by its own arguments; such an answer is not late."""
    if name_of(command) not in ("XREAD", "XREADGROUP"):
        return 0.0
    head = command[: len(command) - len(_after_streams(command))]
    at = next((at for at, word in enumerate(head) if word in ("BLOCK", b"BLOCK")), None)
    return 0.0 if at is None else int(command[at + 1]) / 1000


def slots_of(commands: Sequence[Command]) -> list[int]:
    """A slot for each of some commands; one without a key goes with the one before it, or else with the next."""
    keyed = [keys_of(command) for command in commands]
    slots: list[int | None] = [slot_of(keys[0]) if keys else None for keys in keyed]
    last = next((slot for slot in slots if slot is not None), 0)
    found: list[int] = []
    for slot in slots:
        last = last if slot is None else slot
        found.append(last)
    return found


def sent(command: Command) -> Command:
    """The command as a cluster takes it: what is published on a sharded channel stays in its shard."""
    return ("SPUBLISH", *command[1:]) if name_of(command) == "PUBLISH" and is_sharded(command[1]) else command


def by_slot(command: Command) -> dict[int, Command]:
    """One of SPREAD, or an XREAD, as one command a slot."""
    if name_of(command) in SPREAD:
        return {slot: (command[0], *keys) for slot, keys in _grouped((key, key) for key in command[1:]).items()}
    streams = _after_streams(command)
    head = command[: len(command) - len(streams)]
    count = len(streams) // 2
    parts = _grouped(zip(streams, zip(streams[:count], streams[count:], strict=True), strict=False))
    return {slot: (*head, *(name for name, _ in part), *(last for _, last in part)) for slot, part in parts.items()}


def joined(command: Command, answers: Mapping[int, Any]) -> Any:
    """The answer to a command of SPREAD from the answers to its parts."""
    if name_of(command) != "MGET":
        return sum(answers.values())
    left = {slot: iter(values) for slot, values in answers.items()}
    return [next(left[slot_of(key)]) for key in command[1:]]


def groups(places: Sequence[Place], members: Iterable[int]) -> dict[Place, list[int]]:
    """The members at each place, in their order; the places in that of their first member."""
    found: dict[Place, list[int]] = {}
    for member in members:
        found.setdefault(places[member], []).append(member)
    return found


def _after_streams(command: Sequence[Any]) -> tuple[Any, ...]:
    at = next(at for at, word in enumerate(command) if word in ("STREAMS", b"STREAMS"))
    return tuple(command[at + 1 :])


def _grouped(members: Iterable[tuple[Any, Any]]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for key, member in members:
        found.setdefault(slot_of(key), []).append(member)
    return found
