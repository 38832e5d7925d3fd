"""Recordings: spec and result of ended sequences, stored by the script that commits them (lua/commit.lua).

Two kinds. A recording is found by the sequence's id, for a replay that a client asks for; `SequenceSpec.record_s` makes
it, and MOST_BYTES bounds all of a model's. And a share of all sequences waits in a stream for another worker to check.
Which ones is decided by their ids, so that a repeated commit decides alike.
"""

import hashlib
import zlib
from collections.abc import Collection
from typing import Literal, NamedTuple

from redis.asyncio import Redis

from shared.errors import UnknownRecordingError
from shared.redis import keys
from shared.redis.connection.client import Argument, ask, ask_all
from shared.redis.stream import Stream, StreamEntry
from shared.replay_report import ReplayReport
from shared.sequences import SequenceResult, SequenceSpec, decode_result, decode_spec, encode

MOST_BYTES = 256 << 20  # of the recordings of one model
COURT_ENTRIES = 1_000
COURT_BYTES = 32 << 20
CASES_SHOWN = 32  # sequences that were found wrong, of one worker
MOST_PASSES = 32  # of a case between workers
MOST_CHOICES = 128  # of a completion
_JUDGE = "judge:"  # before the name of a worker, in the fields of verdicts
REPLAYS = "replay-"  # ids of sequences that compute others again begin so


class Recording(NamedTuple):
    """A sequence as it was asked for, and as it ended."""

    spec: SequenceSpec
    result: SequenceResult


class CourtCase(NamedTuple):
    """An entry of the stream of sequences to check."""

    entry: str
    recording: Recording
    found_wrong_by: tuple[str, ...] = ()  # workers that have checked it
    passes: int = 0  # how often it was left to another worker


Standing = Literal["", "disputed", "wrong"]


def standing_of(accusers: Collection[str]) -> Standing:
    """One accuser may be the faulty one itself, so it takes two to find a worker wrong."""
    return "wrong" if len(accusers) > 1 else "disputed" if accusers else ""


async def add_verdict(redis: Redis, model: str, judge: str, report: ReplayReport) -> None:
    """Count what a worker found of another one's sequence."""
    key = keys.verdicts(model, report.worker)
    commands: list[tuple[Argument, ...]] = [
        ("HINCRBY", key, name, count)
        for name, count in (
            ("sequences", 1), ("tokens", report.same + report.ties + report.wrong), ("ties", report.ties),
            ("wrong", report.wrong),
        )
    ]  # fmt: skip
    if report.wrong:
        place = zlib.crc32(report.id.encode()) % CASES_SHOWN
        commands += [("HINCRBY", key, _JUDGE + judge, 1), ("HSET", key, f"case:{place}", f"{report.id} {judge}")]
    await ask_all(redis, [*commands, ("EXPIRE", key, keys.VERDICTS_TTL_S)])


async def forget_verdicts(redis: Redis, model: str, worker: str) -> None:
    """Forget what was found of a worker."""
    await ask(redis, "DEL", keys.verdicts(model, worker))


async def trusted_accusers(redis: Redis, model: str, worker: str) -> list[str]:
    """Workers that found tokens of this one wrong within a day, without those that are found wrong themselves."""
    accusers = await _accusers(redis, model, worker)
    return [each for each in accusers if standing_of(await _accusers(redis, model, each)) != "wrong"]


async def _accusers(redis: Redis, model: str, worker: str) -> list[str]:
    fields = [name.decode() for name in await ask(redis, "HKEYS", keys.verdicts(model, worker))]
    return [name.removeprefix(_JUDGE) for name in fields if name.startswith(_JUDGE)]


def recording_keys(model: str, seq: str) -> list[str]:
    """The keys that the committing script needs to store a sequence."""
    return [
        keys.recording(model, seq),
        keys.recordings(model),
        keys.recordings_stats(model),
        keys.court(model),
        keys.court_stats(model),
    ]


class Recorded(NamedTuple):
    """How the committing script stores a sequence; nothing is stored of one that is not to be cached."""

    for_s: int  # seconds for which it can be replayed; 0: it is not recorded
    is_checked: bool  # another worker is to compute it again

    @classmethod
    def of(cls, spec: SequenceSpec, replay_share: float) -> "Recorded":
        """The same at each repetition of a commit."""
        if not spec.cache:
            return cls(0, is_checked=False)
        return cls(spec.record_s, is_checked=spec.kind == "generate" and is_chosen(spec.id, replay_share))

    @property
    def arguments(self) -> list[Argument]:
        """Arguments of the committing script, for `recording_keys`."""
        checked = "1" if self.is_checked else ""
        return [self.for_s, MOST_BYTES, checked, COURT_ENTRIES, COURT_BYTES, keys.COURT_TTL_S]


def is_chosen(seq: str, share: float) -> bool:
    """True for this share of all sequence ids, the same everywhere; never for a replay's own."""
    if share <= 0 or seq.startswith(REPLAYS):
        return False
    return int.from_bytes(hashlib.sha256(seq.encode()).digest()[:6]) < share * (1 << 48)


async def find_recordings(redis: Redis, models: list[str], name: str) -> list[Recording]:
    """Recordings of the sequence of this id, or of all choices of the completion of this id; UnknownRecordingError."""
    for model in models:
        found: list[Recording] = []
        for at in range(MOST_CHOICES):
            recording = await _find(redis, model, f"{name}-{at}")
            if recording is None:
                break
            found.append(recording)
        alone = None if found else await _find(redis, model, name)
        if alone is not None:
            found = [alone]
        if found:
            return found
    raise unknown_recording(name)


def unknown_recording(name: str) -> UnknownRecordingError:
    """The error for a sequence or completion that is not recorded."""
    return UnknownRecordingError(
        f"no recording of {name[:120]!r}: the ring stores what it generates for --record-ttl-s, which is 0 by default",
        param="id",
    )


async def _find(redis: Redis, model: str, seq: str) -> Recording | None:
    spec, result = await ask(redis, "HMGET", keys.recording(model, seq), "spec", "result")
    return Recording(decode_spec(spec), decode_result(result)) if spec and result else None


class Court(Stream[CourtCase]):
    """One model's sequences to check, for a worker that has nothing else to do."""

    group = keys.GROUP
    unreadable = "court.unreadable"

    def __init__(self, redis: Redis, model: str) -> None:
        super().__init__(redis, keys.court(model), stats=keys.court_stats(model))
        self._model = model

    async def pass_on(self, case: CourtCase, *, found_wrong_by: str = "") -> None:
        """Leave a case to another worker; it is dropped after MOST_PASSES. `found_wrong_by`: one more that found so."""
        if case.passes < MOST_PASSES:
            spec, result = encode(case.recording.spec), encode(case.recording.result)
            judges = " ".join((*case.found_wrong_by, *filter(None, [found_wrong_by])))
            fields: tuple[Argument, ...] = ("id", case.recording.spec.id, "spec", spec, "result", result)
            fields += ("judges", judges, "passes", case.passes + 1, "size", len(spec) + len(result))
            commands: list[tuple[Argument, ...]] = [
                ("XADD", keys.court(self._model), "*", *fields),
                ("HINCRBY", keys.court_stats(self._model), "bytes", len(spec) + len(result)),
                ("EXPIRE", keys.court(self._model), keys.COURT_TTL_S),
                ("EXPIRE", keys.court_stats(self._model), keys.COURT_TTL_S),
            ]
            await ask_all(self._redis, commands)
        await self.done([case.entry])

    @staticmethod
    def _decode(entry: StreamEntry) -> CourtCase:
        recording = Recording(decode_spec(entry.fields[b"spec"]), decode_result(entry.fields[b"result"]))
        judges = entry.fields.get(b"judges", b"").decode().split()
        return CourtCase(entry.id, recording, tuple(judges), int(entry.fields.get(b"passes", 0)))
