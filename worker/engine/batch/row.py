"""A row: one sequence's place in the running batch, and the tag that moves with a batch's KV.

Invariants. `tokens` holds what has been reported, prior attempts included; `position` is the next
completion position to be drawn, at most one ahead of `tokens` (the batch looks one step ahead); `draws` holds
the draws in flight, oldest first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from msgspec import structs

from mlx_model.sampling.draw import Draw
from shared.errors import InvalidGrammarError
from shared.frames import Finish, TokenEvent
from worker.engine.batch.grammars import Place
from worker.engine.batch.stop_text import RowText
from worker.engine.gallery import Viewing
from worker.engine.messages import RowRequest
from worker.engine.prefixes.entries import UNASKED
from worker.engine.reserved import RowTokens

NO_DEADLINE = 1 << 62


class Row:
    """State of one sequence in the engine."""

    __slots__ = (
        "admitted",
        "attempt",
        "cached_tokens",
        "draws",
        "eos_ids",
        "is_over",
        "kv_versions",
        "place",
        "position",
        "predicted",
        "prior",
        "promotion",
        "prompt",
        "reserved",
        "sampling",
        "spec",
        "start",
        "stop_ids",
        "text",
        "tokens",
        "viewing",
    )

    def __init__(self, request: RowRequest, eos_ids: frozenset[int], text: RowText | None) -> None:
        self.spec = request.spec
        self.sampling = request.spec.sampling
        self.prompt = request.spec.kv_prompt  # the ids that its KV is found by; those of its images are negative
        self.viewing = Viewing(request.spec, self.prompt) if request.spec.images else None  # its images
        self.attempt = request.attempt
        self.prior = request.prior
        self.tokens = [token for event in request.prior for token in event.tokens]
        self.start = self.position = len(self.tokens)
        self.eos_ids = frozenset() if self.sampling.ignore_eos else eos_ids
        self.stop_ids = self.eos_ids | frozenset(self.sampling.stop_token_ids)
        self.text = text
        self.draws: deque[tuple[Draw, int]] = deque()
        self.place: Place | None = None  # in its grammar, if it has one
        self.reserved = RowTokens.of(self.spec)
        self.admitted = False  # holds a place and KV; until then it waits
        self.cached_tokens = 0  # of the prompt, from the prefix cache
        self.promotion = UNASKED  # of KV that it waits for
        self.kv_versions: set[str] = set()  # that its KV has been computed with
        self.is_over = False  # its last token has been taken
        self.predicted = (0, 0)  # tokens of its client's prediction that were accepted, and drafted in vain

    @property
    def deadline_ms(self) -> int:
        """When it is given up, Unix milliseconds: its first token, then its end, has a deadline."""
        spec = self.spec
        first = 0 if self.tokens or spec.kind != "generate" else spec.first_token_deadline_ms
        return min(spec.deadline_ms or NO_DEADLINE, first or NO_DEADLINE)

    @property
    def context(self) -> list[int]:
        """The ids to prefill: prompt, then tokens of earlier attempts (or the text to score)."""
        if self.spec.kind == "score":
            return [*self.prompt, *self.spec.score_ids]
        return [*self.prompt, *self.tokens]

    @property
    def may_go_on(self) -> bool:
        """True if a next turn may begin with the row's prompt and answer."""
        return self.spec.kind == "generate" and (self.spec.sequence_class == "interactive" or self.spec.has_next_turn)

    def resume(self) -> Finish | None:
        """Replay earlier attempts; a finish when they already end the sequence."""
        if self.prior and self.prior[-1].finish is not None:
            return self.prior[-1].finish
        match = None
        if self.text is not None and self.tokens:
            seen = sum(len(event.text or "") for event in self.prior)
            match = self.text.replay(self.tokens, self.sampling.min_tokens, seen)
        if match is not None:
            return Finish("stop", match)
        if self.tokens and len(self.tokens) > self.sampling.min_tokens and self.tokens[-1] in self.stop_ids:
            return self._stopped_by(self.tokens[-1])
        return Finish("length") if len(self.tokens) >= self.sampling.max_tokens else None

    def rewind(self) -> None:
        """Forget the draws in flight: the row computes its context anew."""
        self.draws.clear()
        self.cached_tokens = 0
        self.kv_versions.clear()
        self.start = self.position = len(self.tokens)
        if self.place is not None:
            self.place.restart(self.tokens)

    @property
    def depends_on_tokens(self) -> bool:
        """True if a draw depends on earlier tokens in other ways than through the model's logits."""
        s = self.sampling
        return bool(s.bad_words) or (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def is_plain(self) -> bool:
        """True if a draw depends only on logits, seed and position, and reports no more than its log-probability."""
        s = self.sampling
        reports = s.top_logprobs or s.logprob_token_ids or s.return_routed_experts
        return self.is_unedited and not (reports or s.logprobs_mode != "raw_logprobs")

    @property
    def is_unedited(self) -> bool:
        """True if its logits are drawn from as the model computes them."""
        s = self.sampling
        edits = s.logit_bias or s.allowed_token_ids or self.position < s.min_tokens
        return not (edits or self.place is not None or self.depends_on_tokens)

    def tokens_behind(self, token: int) -> list[int]:
        """The completion after its next input; [] where the draw does not depend on it."""
        if not self.depends_on_tokens:
            return []
        return [*self.tokens, token] if self.position > len(self.tokens) else list(self.tokens)

    def ahead(self, tokens: list[int], place: Place | None, steps: int) -> Row:
        """The row as it will be so many steps later, to draw with: `tokens` where its draw depends on them."""
        row = Row.__new__(Row)
        row.spec, row.sampling, row.stop_ids = self.spec, self.sampling, self.stop_ids
        row.tokens, row.place, row.position = tokens, place, self.position + steps
        return row

    def accept(self, token: int) -> tuple[Finish | None, str | None]:
        """Take the next token: the finish it causes, and the visible text it adds (rows with stop strings)."""
        tokens = self.tokens
        may_stop = len(tokens) >= self.sampling.min_tokens
        tokens.append(token)
        finish: Finish | None = None
        if may_stop and token in self.stop_ids:
            finish = self._stopped_by(token)
        elif len(tokens) >= self.sampling.max_tokens:
            finish = Finish("length")
        if self.text is None:
            return finish, None
        if finish is not None and finish.reason == "stop":
            return finish, self.text.flush()
        delta, match = self.text.push(token, may_stop)
        if match is not None:
            return Finish("stop", match), delta
        return finish, delta if finish is None else delta + self.text.flush()

    def _stopped_by(self, token: int) -> Finish:
        return Finish("stop", None if token in self.eos_ids else token)

    def report(self, tokens: Iterable[int], events: list[TokenEvent]) -> None:
        """Append drawn tokens to the row, and to `events` what reports them, and the row's end if its grammar fails.

        Draft tokens after the last one are dropped. If this raises, the tokens before it have been reported.
        """
        before = len(events)
        seq, attempt, top = self.spec.id, self.attempt, self.sampling.top_logprobs
        for token in tokens:
            draw, index = self.draws.popleft()
            tops = None if top is None else [draw.top_logprobs(index, top)]
            routes = draw.routes(index) if self.sampling.return_routed_experts else None
            position, logprob, version = len(self.tokens), draw.logprob(index), draw.versions[index]
            finish, text = self.accept(token)
            last = events[-1] if len(events) > before else None
            if last is None or self.text is not None or last.version != version:  # those with text stay apart
                events.append(
                    TokenEvent(seq, attempt, position, [token], [logprob], tops, text, version, routes=routes)
                )
            else:
                last.tokens.append(token)
                last.logprobs.append(logprob)
                if last.top_logprobs is not None and tops is not None:
                    last.top_logprobs += tops
                if last.routes is not None and routes is not None:
                    last.routes += routes
            if finish is not None:
                events[-1].finish, self.is_over = self._counted(finish), True
                break
        # The grammar has been asked about what comes after all of them.
        if not self.is_over and self.place is not None and self.place.fault:
            events.append(self.last_event(Finish.failed(InvalidGrammarError(self.place.fault))))

    def last_event(self, finish: Finish) -> TokenEvent:
        """An event without tokens that ends the sequence; it carries the text that was held back."""
        text = None if self.text is None else self.text.flush()
        finish = self._counted(finish)
        return TokenEvent(self.spec.id, self.attempt, len(self.tokens), [], [], text=text, finish=finish)

    def take_kv(self, cached: int, versions: set[str]) -> None:
        """It starts with KV of these versions, the first `cached` ids of it from the prefix cache."""
        self.cached_tokens = min(cached, len(self.spec.prompt_ids))
        self.kv_versions |= versions

    def _counted(self, finish: Finish) -> Finish:
        if not (self.cached_tokens or any(self.predicted)):
            return finish
        accepted, rejected = self.predicted
        return structs.replace(
            finish,
            cached_tokens=self.cached_tokens,
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=rejected,
        )


def report_tokens(tokens: Iterable[tuple[Row, int]], events: list[TokenEvent]) -> None:
    """Append the events that report a step's tokens; consecutive tokens of a row share events."""
    for row, drawn in groupby(tokens, itemgetter(0)):
        row.report((token for _, token in drawn), events)


def tenants_of(rows: Iterable[Row]) -> set[str]:
    """Tenants that own these rows."""
    return {row.spec.tenant for row in rows}


class WaitingRows(deque[Row]):
    """Rows that are not admitted: interactive ones before batch ones, each class in order of arrival."""

    def add(self, row: Row) -> None:
        """Wait after the rows of its class."""
        ahead = sum(other.spec.sequence_class == "interactive" for other in self)
        self.insert(ahead if row.spec.sequence_class == "interactive" else len(self), row)


class Deadlines:
    """When the next row has to end."""

    def __init__(self) -> None:
        self._next = NO_DEADLINE

    def add(self, row: Row) -> None:
        """It counts from now on."""
        self._next = min(self._next, row.deadline_ms)

    def passed(self, rows: Collection[Row], now_ms: int) -> list[Row]:
        """Those of all rows whose deadline has passed at this Unix time."""
        if now_ms < self._next:
            return []
        self._next = min((row.deadline_ms for row in rows if row.deadline_ms > now_ms), default=NO_DEADLINE)
        return [row for row in rows if row.deadline_ms <= now_ms]


class RowTag:
    """Last element of a batch's caches: names its rows in the order of their KV.

    It has so much of an mlx-lm cache's interface (mlx_lm/models/cache.py) that it is padded, extended and filtered
    together with the KV. `rows` is a tuple that is replaced, never changed: its identity shows whether the batch has
    changed.
    """

    state: Sequence[Any] = ()

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self.rows = rows

    def extend(self, other: RowTag) -> None:
        """Append the rows of `other`."""
        self.rows = self.rows + other.rows

    def filter(self, keep: Sequence[int]) -> None:
        """Keep the rows at these indices."""
        self.rows = tuple(self.rows[index] for index in keep)

    def prepare(self, **_: Any) -> None:
        """Padding does not concern a tag."""

    def finalize(self) -> None:
        """Padding does not concern a tag."""
