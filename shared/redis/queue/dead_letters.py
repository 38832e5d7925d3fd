"""Dead letters: sequences and messages that were given up, stored with the reason, to be inspected and run again.

Invariants. A requeue happens once: one Lua call takes the letter out and puts its sequence into the queue, under an id
that follows from the letter's, so that saying it again changes nothing. What is requeued stands alone: the client that
asked has had its error, and in its job the sample stays failed (a sample is recorded once); the new outcome is found
under the letter's id until an hour after its end. What cannot be read is kept as it came and can only be dropped.
"""

from typing import Literal, NamedTuple

import msgspec
import structlog
from redis.asyncio import Redis

from shared.errors import ConflictError, UnknownDeadLetterError, UnreadableMessageError
from shared.frames import Finish, TokenEvent
from shared.owners import ADMINS, ANYBODY, Asker
from shared.redis import keys
from shared.redis.connection.client import Argument, Script, ask, members
from shared.redis.tokens.log import read_tokens
from shared.sequences import SequenceClass, SequenceSpec, decode_spec, encode

log = structlog.get_logger()

LETTERS_TTL_S = keys.JOB_TTL_S
MESSAGE_KEPT = 65_536  # bytes of an unreadable message
REQUEUED = "requeued-"  # and the letter's entry: the id of its second life

_REQUEUE, _BURY = Script("requeue"), Script("bury")


class DeadLetter(NamedTuple):
    """One letter. `spec` is None when it holds no sequence that this version can read; `unreadable` is the reason."""

    id: str  # "<model>:<entry>"
    model: str
    sequence: str
    reason: str
    worker: str  # that gave it up
    attempt: int
    job: str
    stream: str
    died_ms: int  # Unix time, by Redis
    spec: SequenceSpec | None
    unreadable: str
    size: int  # bytes of the message

    @property
    def tenant(self) -> str:
        """Owner of the letter; one that cannot be read belongs to the admins, since it may be any tenant's."""
        return ADMINS if self.spec is None else self.spec.tenant


class SecondLife(NamedTuple):
    """The sequence that a requeue has made of a letter."""

    sequence: str
    state: Literal["queued", "running", "done", "cancelled"]
    finish: Finish | None
    events: list[TokenEvent]


class Unusable(NamedTuple):
    """A message that cannot be processed."""

    stream: str
    entry: str
    sequence: str  # its id, if it can be read
    reason: str
    found_by: str
    message: bytes
    group: str = ""  # the stream's consumer group


class DeadLetters:
    """The dead letters of all models."""

    def __init__(self, redis: "Redis") -> None:
        self._redis = redis

    async def _newest(self, model: str, limit: int, newest: str, asker: Asker) -> list[DeadLetter]:
        seen: list[DeadLetter] = []
        while len(seen) < limit:
            entries = await self._redis.xrevrange(keys.dead_letters(model), newest, "-", count=limit)
            letters = [_letter(model, entry, fields) for entry, fields in entries]
            seen += [letter for letter in letters if asker.owns(letter.tenant)]
            if len(entries) < limit:
                break
            newest = f"({entries[-1][0].decode()}"
        return seen[:limit]

    async def list(
        self, model: str = "", limit: int = 100, before: str = "", asker: Asker = ANYBODY
    ) -> list[DeadLetter]:
        """The asker's newest letters, of one model or of all.

        With `before` (a letter's id) only older ones of its model.
        """
        if before:
            model, entry = place_of(before)
        models = [model] if model else await members(self._redis, keys.models())
        found: list[DeadLetter] = []
        for name in models:
            found += await self._newest(name, limit, f"({entry}" if before else "+", asker)
        return sorted(found, key=lambda letter: letter.died_ms, reverse=True)[:limit]

    async def get(self, letter_id: str) -> DeadLetter | None:
        """A letter; None when it has been requeued, dropped, or has expired."""
        model, entry = place_of(letter_id)
        entries = await self._redis.xrange(keys.dead_letters(model), entry, entry)
        return _letter(model, *entries[0]) if entries else None

    async def owner(self, letter_id: str) -> str | None:
        """Owner of the letter, or of the sequence that a requeue has made of it; None when there is neither."""
        letter = await self.get(letter_id)
        if letter is not None:
            return letter.tenant
        model, entry = place_of(letter_id)
        state, tenant = await ask(self._redis, "HMGET", keys.sequence(model, REQUEUED + entry), "state", "tenant")
        return None if state is None else (tenant or b"").decode()

    async def requeue(self, letter_id: str) -> tuple[str, bool]:
        """Run a letter's sequence again: the id of the new sequence, and whether this call did it.

        Raises UnknownDeadLetterError, and ConflictError for what cannot be read.
        """
        letter = await self.get(letter_id)
        model, entry = place_of(letter_id)
        new_id = REQUEUED + entry
        if letter is None:
            if await self._redis.exists(keys.sequence(model, new_id)):
                return new_id, False
            raise unknown_letter(letter_id)
        if letter.spec is None:
            raise ConflictError(f"dead letter '{letter_id}' holds no sequence that can run: {letter.unreadable}")
        spec = msgspec.structs.replace(letter.spec, id=new_id, model=model, api="", job="", group="", deadline_ms=0)
        names = [keys.dead_letters(model), keys.queue(model, spec.sequence_class), keys.sequence(model, new_id)]
        args: list[Argument] = [keys.GROUP, keys.JOB_TTL_S, entry, new_id, spec.kv_tokens, encode(spec), spec.tenant]
        done = int(await _REQUEUE(self._redis, names, args))
        if not done:
            raise unknown_letter(letter_id)
        return new_id, done == 1

    async def drop(self, letter_id: str) -> bool:
        """Delete a letter; False when it was not there."""
        model, entry = place_of(letter_id)
        return bool(await self._redis.xdel(keys.dead_letters(model), entry))

    async def second_life(self, letter_id: str) -> SecondLife | None:
        """The state of its sequence after a requeue; None when it was not requeued, or too long ago."""
        model, entry = place_of(letter_id)
        seq = REQUEUED + entry
        state = await ask(self._redis, "HGET", keys.sequence(model, seq), "state")
        if state is None:
            return None
        events = await read_tokens(self._redis, model, seq, 0)
        return SecondLife(seq, state.decode(), events[-1].finish if events else None, events)


async def bury(redis: "Redis", model: str, unusable: Unusable) -> bool:
    """Move an unusable message from its stream to the dead letters; False when it was gone."""
    log.warning("deadletters.buried", model=model, stream=unusable.stream, id=unusable.sequence, reason=unusable.reason)
    names = [unusable.stream, keys.dead_letters(model)]
    args: list[Argument] = [unusable.group, unusable.entry, unusable.sequence, unusable.reason, unusable.found_by]
    return bool(await _BURY(redis, names, [*args, unusable.message[:MESSAGE_KEPT], LETTERS_TTL_S]))


def place_of(letter_id: str) -> tuple[str, str]:
    """Model and entry of a letter's id; UnknownDeadLetterError when it is none."""
    model, colon, entry = letter_id.rpartition(":")
    ms, dash, number = entry.partition("-")
    if not (colon and model and dash and _is_64_bit(ms) and _is_64_bit(number)):
        raise unknown_letter(letter_id)
    return model, entry


def _is_64_bit(digits: str) -> bool:
    """True if the digits are one of the two 64-bit numbers of an entry's id."""
    return digits.isascii() and digits.isdigit() and len(digits) <= 20 and int(digits) < 2**64


def unknown_letter(letter_id: str) -> UnknownDeadLetterError:
    """The error for a letter that is not there."""
    return UnknownDeadLetterError(f"no dead letter '{letter_id}'; letters are stored for 7 days", param="letter_id")


def _letter(model: str, entry: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    def text(name: bytes) -> str:
        return fields.get(name, b"").decode(errors="replace")

    packed = fields.get(b"spec", b"")
    spec, unreadable = _spec(packed, text(b"stream"))
    attempt = text(b"attempt")
    return DeadLetter(
        id=f"{model}:{entry.decode()}",
        model=model,
        sequence=text(b"id"),
        reason=text(b"reason"),
        worker=text(b"worker"),
        attempt=int(attempt) if attempt.isdigit() else 0,
        job=text(b"job"),
        stream=text(b"stream"),
        died_ms=int(entry.split(b"-")[0]),
        spec=spec,
        unreadable=unreadable,
        size=len(packed),
    )


def _spec(packed: bytes, stream: str) -> tuple[SequenceSpec | None, str]:
    if not packed:
        return None, "nothing of it is left"
    if ":queue:" not in stream:
        return None, f"it came from {stream}"
    try:
        spec = decode_spec(packed)
    except UnreadableMessageError as error:
        return None, error.message
    kind: SequenceClass = "batch" if ":queue:batch" in stream else "interactive"
    return msgspec.structs.replace(spec, sequence_class=kind), ""
