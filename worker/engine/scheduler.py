"""The choice of what to compute next, pure: which prompts to feed, how much of them at once, and what there is room
for.

Interactive prompts are fed first, and a batch prompt that has begun pauses meanwhile; but a batch prompt is never
passed more than `PASSES` times in a row. A batch prompt's piece is kept short, because new rows wait for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_model.config import DraftKv
from shared.errors import (
    ContextLengthExceededError,
    EmptyPromptError,
    InvalidRequestError,
    ParallmError,
)
from shared.sequences import ModelCard, SequenceClass, SequenceSpec, held, vocabulary_error

SMALLEST_PIECE = 64  # tokens of a batch prompt in one turn: fewer waste a forward
NARROWEST = 256  # tokens that one prompt is fed at least, however long its past: more forwards would cost more
UNDISTURBED = 4  # times as much at once while nothing decodes; still short enough for cancels and arrivals
PASSES = 3  # turns in a row in which interactive prompts pass a batch prompt, or a CPU's decode step
LONG_TOGETHER = 4  # long prompts that are fed in turn
SHARE_OF_A_PIECE = 0.5  # of what a turn takes without it: the time for a piece of a batch prompt
_NO_DRAFTS = DraftKv()
TRY_MORE_EVERY = 16
RECENT = 0.05  # weight of the latest turn
LATE = 2.0  # times the planned time: a piece that takes longer makes the next one smaller
LEAST_OF_A_CHUNK = 0.25  # that is left of it after one late piece, which may have been the machine's fault
GROWTH = 1.25


@dataclass(frozen=True)
class PrefillShare:
    """Prompt tokens for one turn of the loop: in the batch, and in our own lane."""

    batch: int
    lane: int


def haste(decoding: int) -> int:
    """How many times as much is done between two steps as while rows decode, of which there are so many."""
    return 1 if decoding else UNDISTURBED


def share_prefill(budget: int, *, batch_waits: bool, lane_waits: bool) -> PrefillShare:
    """Divide a turn's prompt tokens; half each when both wait."""
    if batch_waits and lane_waits:
        return PrefillShare(budget - budget // 2, max(1, budget // 2))
    return PrefillShare(budget, budget)


class ClassTurns:
    """Whose prompts are fed next."""

    def __init__(self) -> None:
        self._passed = 0  # turns in a row that batch prompts have waited for interactive ones

    def choose(self, waiting: set[SequenceClass]) -> SequenceClass:
        """The class of this turn, of those that wait: interactive, unless it is batch's turn by now."""
        if len(waiting) < 2:
            self._passed = 0
            return next(iter(waiting), "interactive")
        if self._passed == PASSES:
            self._passed = 0
            return "batch"
        self._passed += 1
        return "interactive"


class PieceSizes:
    """How long a piece of a batch prompt may be, by what recent turns have taken.

    A turn takes `a + b * tokens`, a for the decode step and for a forward's overhead. Pieces get half of a: where that
    is fewer than SMALLEST_PIECE tokens, the machine is busy with so many, and larger pieces would save nothing.
    """

    def __init__(self) -> None:
        self._turns = 0
        self._tokens = self._seconds = 0.0  # means over recent turns
        self._spread = self._slope = 0.0  # variance of tokens, and their covariance with seconds

    def turn(self, tokens: int, seconds: float) -> None:
        """One turn's prompt tokens and time."""
        self._turns += 1
        recent = max(RECENT, 1 / self._turns)
        off, late = tokens - self._tokens, seconds - self._seconds
        self._tokens += recent * off
        self._seconds += recent * late
        self._spread += recent * ((1 - recent) * off * off - self._spread)
        self._slope += recent * ((1 - recent) * off * late - self._slope)

    def piece(self, budget: int) -> int:
        """Tokens of batch prompts for one turn, at most `budget`; now and then more, to see what they take."""
        token_s = self._slope / self._spread if self._spread else 0.0
        fixed_s = self._seconds - token_s * self._tokens
        # Where more tokens seem to take no more time, longer pieces show what they do take.
        allowed = fixed_s / token_s * SHARE_OF_A_PIECE if token_s > 0 else 2 * self._tokens
        chunk = max(SMALLEST_PIECE, int(min(allowed, budget)))
        return min(budget, chunk * 2 if self._turns % TRY_MORE_EVERY == 0 else chunk)


class ChunkSize:
    """How many prompt tokens are fed between two decode steps: the chunk, or fewer after a piece that came late.

    The chunk was found on an idle machine and short prompts. Where others compute, too, or a prompt has a long past,
    as many tokens take longer, and all rows wait. `piece_s`: the time that a piece should take.
    """

    def __init__(self, chunk: int, piece_s: float, most: int = 0, alone: tuple[int, int] | None = None) -> None:
        """`most`: up to which an unmeasured chunk may grow. `alone`: fewest and most tokens while nothing decodes."""
        self.tokens = chunk
        self._chunk = max(chunk, most)
        self._piece_s = piece_s
        self._alone = alone
        self._bare_s = 0.0  # mean of recent turns without a prompt

    def at_once(self, decoding: int) -> int:
        """Prompt tokens for one turn while so many rows decode."""
        tokens = self.tokens * haste(decoding)
        if decoding or self._alone is None:
            return tokens
        fewest, most = self._alone
        return min(max(tokens, fewest), most)

    def measured(self, chunk: int) -> None:
        """So many are fed in time."""
        self._chunk = self.tokens = chunk

    def turn(self, tokens: int, seconds: float) -> None:
        """One turn's prompt tokens and time."""
        if not tokens:
            self._bare_s += (seconds - self._bare_s) * (RECENT if self._bare_s else 1)
            return
        took = seconds - self._bare_s
        planned = self._piece_s * max(1.0, tokens / self.tokens)  # while nothing decodes, several chunks go at once
        if took > LATE * planned:
            smaller = int(self.tokens * max(LEAST_OF_A_CHUNK, planned / took))
            self.tokens = min(self._chunk, max(SMALLEST_PIECE, smaller))
        elif took < planned and 2 * tokens >= self.tokens:  # fewer say nothing of a whole piece
            self.tokens = min(self._chunk, math.ceil(GROWTH * self.tokens))


@dataclass(frozen=True)
class Unfed:
    """A prompt that is not through."""

    left: int  # tokens to be fed before its last one
    fed_at: int = 0  # the turn in which it was fed last; 0: it has not begun
    past: int = 0  # tokens whose KV is there


@dataclass(frozen=True)
class Feed:
    """Prompts to feed in one forward, at most `chunk` tokens of each."""

    prompts: tuple[int, ...]
    chunk: int


def widest(past: int, area: int | None) -> float:
    """Tokens of one prompt that a forward may take after `past` ones: width x (past + width) is within the area."""
    if area is None:
        return math.inf
    return max(NARROWEST, (math.isqrt(past * past + 4 * area) - past) // 2)


def feed_next(
    prompts: Sequence[Unfed],
    budget: int,
    most: int,
    *,
    after_short: bool,
    area: int | None = None,
) -> Feed:
    """Which of these prompts of one class, in order of arrival, to feed next.

    Short ones, which the budget feeds to their end, go together, at most `most`. Long ones are fed alone, piece by
    piece and in turn. Where both wait they alternate (`after_short`: the last ones were short): a short prompt need not
    wait for the end of a long one, nor a long one for an end of the short ones. `area`: what rows x width x (past +
    width) may be, besides (warm_up.py says why).
    """
    short: list[int] = []
    longest = past = 0
    for at, prompt in enumerate(prompts):
        width = max(longest, prompt.left)
        behind = max(past, prompt.past)
        rows = len(short) + 1
        if area is not None and rows * width * (behind + width) > area and (short or width > widest(behind, area)):
            continue
        if not prompt.fed_at and len(short) < most and rows * width <= budget:
            short.append(at)
            longest, past = width, behind
    long = [at for at, prompt in enumerate(prompts) if prompt.fed_at]
    if len(long) < LONG_TOGETHER:
        too_long = [prompt.left > min(budget, widest(prompt.past, area)) for prompt in prompts]
        long += [at for at, prompt in enumerate(prompts) if not prompt.fed_at and too_long[at]][:1]
    if short and not (long and after_short):
        return Feed(tuple(short), max(1, longest))
    at = min(long, key=lambda at: prompts[at].fed_at)
    return Feed((at,), int(min(budget, prompts[at].left, widest(prompts[at].past, area))))


@dataclass(frozen=True)
class Limits:
    """Limits of the model and of this worker's memory."""

    vocab_size: int
    context_length: int
    kv_bytes_per_token: int
    kv_limit_bytes: int
    kv_window: int = 0  # positions that a row holds at most; 0: all
    draft: DraftKv = field(default_factory=DraftKv)
    unshared_bytes: int = 0  # of those of a token, the part that each row has by itself in any case
    state_bytes: int = 0  # of a row's recurrent states

    @classmethod
    def of(cls, card: ModelCard, kv_limit_bytes: int, draft: DraftKv = _NO_DRAFTS) -> "Limits":
        """Those of a model on this worker."""
        return cls(
            card.vocab_size,
            card.context_length,
            card.kv_bytes_per_token,
            kv_limit_bytes,
            card.kv_window,
            draft,
            card.kv_unshared_bytes,
            card.kv_state_bytes,
        )

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of KV of a row with `tokens` tokens."""
        return held(tokens, self.kv_window) * self.kv_bytes_per_token

    def shared_bytes(self, tokens: int) -> int:
        """Bytes of `tokens` positions in the layers whose KV rows can share."""
        return tokens * (self.kv_bytes_per_token - self.unshared_bytes)

    def reserved_bytes(self, tokens: int) -> int:
        """Bytes to reserve for such a row, including recurrent states and the draft model's KV."""
        return self.kv_bytes(tokens) + self.state_bytes + min(tokens, self.draft.most) * self.draft.bytes_per_token

    def refusal(self, spec: SequenceSpec) -> ParallmError | None:
        """Why this sequence can never run here; None when it can."""
        if spec.kind == "network":
            return None
        if not spec.prompt_ids:
            return EmptyPromptError("the prompt has no tokens")
        for ids in (spec.prompt_ids, spec.score_ids, spec.prediction_ids):
            if error := vocabulary_error(ids, self.vocab_size):
                return error
        if spec.kind == "generate" and spec.sampling.max_tokens < 1:
            return InvalidRequestError("max_tokens must be at least 1", param="max_tokens")
        return self._too_long(spec)

    def _too_long(self, spec: SequenceSpec) -> ParallmError | None:
        wanted = spec.kv_tokens
        if wanted > self.context_length:
            return ContextLengthExceededError(
                f"{len(spec.prompt_ids)} prompt tokens and {wanted - len(spec.prompt_ids)} to come exceed "
                f"the model's context of {self.context_length}"
            )
        if self.kv_bytes(wanted) > self.kv_limit_bytes:
            return ContextLengthExceededError(
                f"{wanted} tokens need {self.kv_bytes(wanted)} bytes of KV; this worker has {self.kv_limit_bytes}"
            )
        return None
