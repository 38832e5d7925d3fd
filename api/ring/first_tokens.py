"""When a request's first token would come, as the workers' heartbeats have it, and whether that is in time.

A sequence waits for a row while those ahead of it are claimed, at the pace that full workers measure
(worker/service_rates.py), and then for its prompt. From that follows how many may wait so that the next one is still in
time. The queue itself compares (shared/redis/queue/lua/enqueue.lua), since it alone knows how many wait at that moment.

Invariants. Without a measured pace nothing is refused, nor while workers with free rows take what comes: the queue
looks whether anything has waited for longer than that takes. Who was refused comes back in when a tenth of the bound
has been worked off, so that a queue at its bound does not let in every other request. What was refused changes nothing
of what is predicted: only prompts that were let in wait. A prompt, however long, has half the places of others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from shared.redis.processes.worker_registry import WorkerStatus
from shared.redis.queue.sequence_queue import Timely
from shared.sequences import SequenceClass

RECENT = 0.05  # weight of the latest request's prompts, the very first one's too
RESERVE = 0.3  # of the time until the deadline: paces change, and a queue need not be long to keep rows full
LET_IN_BELOW = 0.9  # of the bound, once something has been refused
LONGEST_RETRY_S = 600
OWN_SHARE = 0.5  # of the time to wait in, which a request's own prompt takes at most: else it would never be let in
IDLE_S, IDLE_SHARE = 0.2, 0.1  # what waits for so long, or this share of the deadline, waits for a row


@dataclass(frozen=True)
class Forecast:
    """Pace at which a model's workers begin one class of sequences."""

    claims_per_s: float
    first_token_s: float  # after the claim
    prompt_tokens: float  # of the sequences that this was measured with
    prompt_tokens_per_s: float  # 0: prompts are not what bounds the pace, so it is not known

    @classmethod
    def of(cls, workers: Sequence[WorkerStatus], kind: SequenceClass) -> Self | None:
        """None while no worker has measured its pace, or not all of them take work. The others count by their rows."""
        name = f"claims_per_s:{kind}"
        measured = [worker for worker in workers if worker.extra.get(name) and "first_token_s" in worker.extra]
        if not measured or any(worker.state != "ready" for worker in workers):
            return None
        paces = [worker.extra[name] for worker in measured]
        whole = sum(worker.max_rows for worker in workers) / max(1, sum(worker.max_rows for worker in measured))

        def mean(figure: str) -> float:
            shares = zip(measured, paces, strict=True)
            return sum(worker.extra.get(figure, 0.0) * pace for worker, pace in shares) / sum(paces)

        fed = [worker.extra.get("prompt_tokens_per_s", 0.0) for worker in measured]
        return cls(
            claims_per_s=whole * sum(paces),
            first_token_s=mean("first_token_s"),
            prompt_tokens=mean("prompt_tokens"),
            prompt_tokens_per_s=whole * sum(fed) if all(fed) else 0.0,
        )

    def pace(self, prompt_tokens: float) -> float:
        """Claims a second when so long prompts wait: what is fed in a second bounds it, too."""
        longer = prompt_tokens > self.prompt_tokens and self.prompt_tokens_per_s
        return min(self.claims_per_s, self.prompt_tokens_per_s / prompt_tokens) if longer else self.claims_per_s

    def own_s(self, tokens: int) -> float:
        """Seconds that a prompt of this length takes beyond the measured ones, as far as that is known."""
        return max(0.0, tokens - self.prompt_tokens) / self.prompt_tokens_per_s if self.prompt_tokens_per_s else 0.0

    def seconds(self, waiting: int, prompt_tokens: float, own_tokens: int = 0) -> float:
        """Time until the first token of a sequence after so many others with prompts of this mean length."""
        return waiting / self.pace(prompt_tokens) + self.first_token_s + self.own_s(own_tokens)


class FirstTokens:
    """Predicts first tokens of this process's sequences, and decides which requests are refused for them."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[tuple[str, SequenceClass], float] = {}  # mean of those let in here lately
        self._refusing: set[tuple[str, SequenceClass]] = set()

    def prompt_tokens(self, model: str, kind: SequenceClass) -> float:
        """Mean length of the prompts that wait, as far as they were let in here."""
        return self._prompt_tokens.get((model, kind), 0.0)

    def reserved_share(self, model: str, kind: SequenceClass) -> float:
        """Share of the deadline that no waiting is planned for."""
        return 1 - (1 - RESERVE) * self._share(model, kind)

    def places(self, forecast: Forecast, model: str, kind: SequenceClass, tokens: int, within_s: float) -> Timely:
        """How many sequences of the model may wait, so that one with a prompt of `tokens` is in time after them."""
        left_s = max(0.0, (1 - RESERVE) * within_s - forecast.first_token_s)
        left_s -= min(forecast.own_s(tokens), OWN_SHARE * left_s)
        places = left_s * forecast.pace(self.prompt_tokens(model, kind)) * self._share(model, kind)
        return Timely(int(places), int(1000 * min(IDLE_S, IDLE_SHARE * max(0.0, within_s))))

    def let_in(self, model: str, kind: SequenceClass, tokens: int) -> None:
        """The queue had a place for one with a prompt of `tokens`."""
        self._refusing.discard((model, kind))
        before = self.prompt_tokens(model, kind)
        self._prompt_tokens[model, kind] = before + RECENT * (tokens - before)

    def refused(self, forecast: Forecast, model: str, kind: SequenceClass, too_many: int, places: int) -> int:
        """So many wait beyond the places: seconds until they are gone, and with them a tenth of the places."""
        self._refusing.add((model, kind))
        more = too_many + (1 - LET_IN_BELOW) * places
        return max(1, min(LONGEST_RETRY_S, math.ceil(more / forecast.pace(self.prompt_tokens(model, kind)))))

    def _share(self, model: str, kind: SequenceClass) -> float:
        return LET_IN_BELOW if (model, kind) in self._refusing else 1.0
