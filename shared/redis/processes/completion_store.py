"""Completions of sequences, stored by their prompts: workers of the ring draft from it (worker/ring_memory.py).

Invariants. A prompt's name is a digest that its tenant has gone into: who does not know tenant and prompt does not find
it. What is kept is bounded: completions and bytes of a prompt, bytes of all, time since the last use; the prompts that
were used longest ago go first. Losing any of it costs drafts and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from redis.asyncio import Redis

from shared.redis import keys
from shared.redis.connection.client import Argument, Script

MOST_COMPLETIONS = 32  # of one prompt
PROMPT_BYTES = 256 << 10  # of all completions of one prompt
COMPLETION_IDS = 16_384  # the first ones of a completion that is longer
MARK_BYTES = 8

_add = Script("completions_add")
_read = Script("completions_read")


class Completion(msgspec.Struct, frozen=True, array_like=True):
    """Ids that one sequence has written."""

    mark: bytes  # of the sequence: a write that is repeated adds nothing
    packed: bytes  # ids, four bytes each, little-endian

    @property
    def is_whole(self) -> bool:
        """True if mark and ids have possible lengths."""
        return len(self.mark) == MARK_BYTES and len(self.packed) % 4 == 0


@dataclass(frozen=True)
class Bounds:
    """Time to live of completions since the last use of their prompt, and their bound in bytes."""

    ttl_s: int
    bytes: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Completion)


class CompletionStore:
    """Completions of all prompts of a ring."""

    def __init__(self, redis: Redis, bounds: Bounds) -> None:
        self._redis = redis
        self._bounds = bounds

    async def add(self, prompt: bytes, completions: Sequence[Completion]) -> None:
        """Store these completions of a prompt, the latest last."""
        bounds, name = self._bounds, prompt.hex()
        args: list[Argument] = [keys.completions(""), name, bounds.ttl_s, bounds.bytes]
        args += [min(PROMPT_BYTES, bounds.bytes), MOST_COMPLETIONS, *map(_encoder.encode, completions)]
        await _add(self._redis, [keys.completions(name), keys.completion_uses(), keys.completion_sizes()], args)

    async def read(self, prompts: Sequence[bytes]) -> list[list[Completion]]:
        """The stored completions of each prompt, the latest last; unreadable ones are left out."""
        names = [prompt.hex() for prompt in prompts]
        found = await _read(
            self._redis,
            [keys.completion_uses(), *map(keys.completions, names)],
            [self._bounds.ttl_s, *names],
        )
        return [[read for entry in entries if (read := _decoded(entry))] for entries in found]


def _decoded(entry: bytes) -> Completion | None:
    try:
        read = _decoder.decode(entry)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return read if read.is_whole else None
