"""Recordings: spec and result of ended sequences, stored by the script that commits them (lua/commit.lua).

Two kinds. A recording is found by the sequence's id, for a replay that a client asks for; `SequenceSpec.record_s` makes
it, and MOST_BYTES bounds all of a model's. And a share of all sequences waits in a stream for another worker to check.
Which ones is decided by their ids, so that a repeated commit decides alike.
"""

import hashlib
from typing import NamedTuple

from redis.asyncio import Redis

from shared.errors import UnknownRecordingError
from shared.redis import keys
from shared.redis.connection.client import Argument, ask, ask_all
from shared.redis.stream import Stream, StreamEntry
from shared.sequences import SequenceResult, SequenceSpec, decode_result, decode_spec, encode

MOST_BYTES = 256 << 20  # of the recordings of one model
COURT_ENTRIES = 1_000
COURT_BYTES = 32 << 20
MOST_CHOICES = 128  # of a completion
REPLAYS = "replay-"  # ids of sequences that compute others again begin so


class Recording(NamedTuple):
    """A sequence as it was asked for, and as it ended."""

    spec: SequenceSpec
    result: SequenceResult


class CourtCase(NamedTuple):
    """An entry of the stream of sequences to check."""

    entry: str
    recording: Recording


def recording_keys(model: str, seq: str) -> list[str]:
    """The keys that the committing script needs for `recording_arguments`."""
    return [
        keys.recording(model, seq),
        keys.recordings(model),
        keys.recordings_stats(model),
        keys.court(model),
        keys.court_stats(model),
    ]


def recording_arguments(spec: SequenceSpec, replay_share: float) -> list[Argument]:
    """Arguments of the committing script that say for how long a sequence is recorded, and whether it is checked."""
    chosen = "1" if spec.kind == "generate" and is_chosen(spec.id, replay_share) else ""
    return [spec.record_s, MOST_BYTES, chosen, COURT_ENTRIES, COURT_BYTES, keys.COURT_TTL_S]


def needs_result(spec: SequenceSpec, replay_share: float) -> bool:
    """True if a commit must carry the result for a recording."""
    return bool(spec.record_s) or is_chosen(spec.id, replay_share)


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

    async def pass_on(self, case: CourtCase) -> None:
        """Leave a case to another worker."""
        spec, result = encode(case.recording.spec), encode(case.recording.result)
        fields = ("id", case.recording.spec.id, "spec", spec, "result", result, "size", len(spec) + len(result))
        await ask_all(self._redis, [("XADD", keys.court(self._model), "*", *fields)])
        await self.done([case.entry])

    @staticmethod
    def _decode(entry: StreamEntry) -> CourtCase:
        recording = Recording(decode_spec(entry.fields[b"spec"]), decode_result(entry.fields[b"result"]))
        return CourtCase(entry.id, recording)
