"""Replays recorded sequences through the ring: as sequences of their own, in the class of batch work.

Invariants. A replay goes queue -> worker -> result like everything else. It is never recorded, collected or replayed
itself. All of its KV is computed by the worker that replays: none comes from a cache, where a faulty worker may have
put it.
"""

import math
import uuid

import msgspec
from redis.asyncio import Redis

from shared.errors import EngineError, ServiceUnavailableError, UnsupportedModelError
from shared.frames import VersionSpan
from shared.redis.queue.sequence_calls import SequenceCalls
from shared.redis.recordings import REPLAYS, Recording
from shared.replay import MOST_DIFFERENCES, chances_of, gap_of, replayed_part, with_all_chances
from shared.replay_report import Difference, ReplayReport, Verdict
from shared.sequences import ModelCard, SequenceResult, SequenceSpec

TRIES = 5  # to have one worker, and no other, compute a part


def replay_calls(redis: Redis, model: str) -> SequenceCalls:
    """Calls for replays alone, to be entered; their results go to a name that nothing else uses."""
    return SequenceCalls(redis, model, f"{REPLAYS}{uuid.uuid4().hex}")


class Replayer:
    """Computes recorded sequences of one model again."""

    def __init__(self, calls: SequenceCalls, card: ModelCard) -> None:
        self._calls = calls
        self._card = card

    async def replay(self, recording: Recording, bound: float, *, on: str = "") -> ReplayReport:
        """Compute a recording again and compare it, with this bound of probability.

        `on`: the worker that must do it; ServiceUnavailableError when others take the work each time.
        UnsupportedModelError for what generates nothing. EngineError when the ring cannot compute it.
        """
        spec, recorded = recording
        if spec.kind != "generate":
            raise UnsupportedModelError(f"a sequence of kind {spec.kind!r} generates no tokens to replay")
        found = _Findings(recorded, bound)
        for span in recorded.spans:
            if span.start < len(spec.prior_ids):
                continue
            if span.start and spec.kv_on_swap == "keep":
                found.leave(span.end - span.start, "the adapter was swapped, and the row went on with earlier KV")
                continue
            await self._replay_span(recording, span, found, on)
        return found.report(spec.id)

    async def _replay_span(self, recording: Recording, span: VersionSpan, found: "_Findings", on: str) -> None:
        spec, recorded = recording
        at = span.start
        while at < span.end:
            if len(found.differences) >= MOST_DIFFERENCES:
                found.leave(span.end - at, f"more than {MOST_DIFFERENCES} tokens differ")
                return
            part = replayed_part(spec, recorded, at, span.end, span.version)
            again = await self._compute(part, found, on)
            while at < span.end and at < len(again.completion_ids):
                if again.completion_ids[at] != recorded.completion_ids[at]:
                    break
                found.drew_the_same(at, again)
                at += 1
            if at >= span.end:
                return
            drawn = again.completion_ids[at] if at < len(again.completion_ids) else -1
            whole = with_all_chances(replayed_part(spec, recorded, at, at + 1, span.version), self._card.vocab_size)
            chances = chances_of(await self._compute(whole, found, on), self._card.vocab_size)
            token = recorded.completion_ids[at]
            found.drew_another(at, drawn, float(chances[token]), gap_of(chances, spec.sampling, at, token))
            at += 1

    async def _compute(self, part: SequenceSpec, found: "_Findings", on: str) -> SequenceResult:
        for _ in range(TRIES):
            one = msgspec.structs.replace(part, id=f"{REPLAYS}{uuid.uuid4().hex}", job=self._calls.owner)
            (result,) = await self._calls.call([one], prefer=(on,) if on else ())
            if result.finish.failure:
                raise EngineError(f"the replay failed: {result.finish.failure}")
            if on in ("", result.worker):
                found.by(result.worker)
                return result
        raise ServiceUnavailableError(f"other workers than {on} took the replay")


class _Findings:
    """Verdicts on the tokens of one recorded sequence, as they come."""

    def __init__(self, recorded: SequenceResult, bound: float) -> None:
        self._recorded, self._bound = recorded, bound
        self._workers: dict[str, None] = {}
        self._counts: dict[Verdict, int] = {"same": 0, "tie": 0, "wrong": 0, "not judged": 0}
        self._largest = 0.0
        self._note = ""
        self.differences: list[Difference] = []

    def by(self, worker: str) -> None:
        self._workers[worker] = None

    def leave(self, tokens: int, why: str) -> None:
        """Do not judge this many tokens."""
        self._counts["not judged"] += tokens
        self._note = why

    def drew_the_same(self, position: int, again: SequenceResult) -> None:
        """The replay drew the recorded token, perhaps with another probability."""
        before, now = math.exp(self._recorded.logprobs[position]), math.exp(again.logprobs[position])
        token = self._recorded.completion_ids[position]
        self._judge("same", Difference(position, "same", token, token, before, now, abs(before - now)))

    def drew_another(self, position: int, drawn: int, chance: float, gap: float) -> None:
        """The replay drew another token, or none, where the recorded one has this chance in it."""
        before, token = math.exp(self._recorded.logprobs[position]), self._recorded.completion_ids[position]
        self._judge("tie", Difference(position, "tie", token, drawn, before, chance, gap))

    def _judge(self, verdict: Verdict, difference: Difference) -> None:
        if difference.gap > self._bound:
            verdict = "wrong"
        else:
            self._largest = max(self._largest, difference.gap)
        self._counts[verdict] += 1
        if verdict != "same":
            self.differences.append(msgspec.structs.replace(difference, verdict=verdict))

    def report(self, seq: str) -> ReplayReport:
        return ReplayReport(
            seq,
            self._recorded.worker,
            tuple(self._workers),
            self._bound,
            len(self._recorded.completion_ids),
            self._counts["same"],
            self._counts["tie"],
            self._counts["wrong"],
            self._counts["not judged"],
            self._largest,
            tuple(self.differences),
            self._note,
        )
