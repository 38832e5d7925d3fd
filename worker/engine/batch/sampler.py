"""One sampler for all rows of a batch: called once per decode step with the whole [B, V].

Every row draws with its own parameters, in the order that `SamplingParams` documents: logit bias, min_tokens and
penalties on the raw logits, allowed and bad tokens, the grammar's mask, temperature, then top_k, top_p and min_p.
Log-probabilities that are reported are fp32 log-softmax of the raw logits, before all of that (what a trainer calls mu
at temperature 1); of rows that ask for processed ones, of the logits after it, where what was filtered out has none.

Invariants. Whatever depends on the rows only is prepared when the batch changes (`SamplingPlan`), so a step costs few
operations. Each call leaves one `Draw` and appends it to every row's `draws`; its numbers are pulled to the host once,
when the step after it is already under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_model.device import on_cpu, on_metal
from mlx_model.sampling.cuda import draws
from mlx_model.sampling.draw import (
    BLOCK,
    SMALLEST,
    Draw,
    draw_by_chance,
    draw_of_all,
    most_likely,
    nucleus_by_halving,
    nucleus_threshold,
    uniforms,
    uniforms_at,
)
from mlx_model.sampling.named_tokens import NamedLogprobs, NamedTokens
from worker.engine.batch.grammar_masks import GrammarMasks
from worker.engine.batch.numbers import Floats, Indices, Numbers, PlainRows
from worker.engine.batch.penalties import LogitEdits, Penalties
from worker.engine.batch.row import Row
from worker.engine.batch.row_model import RowModel
from worker.engine.batch.token_masks import TokenMasks

LOWEST = -9999.0  # reported of what cannot be drawn: JSON has no infinity (OpenAI's number)
NOISE_STEPS = 32  # that noise is made for at once
MORE = 64  # times as many candidates are sorted where they did not suffice
SORT_ALL_BELOW = 1024  # a vocabulary this small is sorted whole: cheaper than asking whether candidates suffice


class RowSampler:
    """Draws the next token of every row of the batch that `model` has just computed."""

    def __init__(self, model: RowModel, candidates: int = 256) -> None:
        self._model = model
        self._candidates = candidates
        self._halves = model.tuning is not None and bool(model.tuning.halves)
        self._rows: tuple[Row, ...] = ()
        self._plan: SamplingPlan | None = None
        self._plans: list[SamplingPlan] = []  # of each row, where rows do not depend on one another
        self._plain = PlainRows()
        self._ahead: tuple[Numbers, bytes | int, SamplingPlan] | None = (
            None  # of plain rows, and which places each had, last
        )

    def __call__(self) -> mx.array:
        """Token ids [B] uint32, of the logits that the model has kept."""
        rows = self._model.rows
        logits_B1V, tokens_B1 = self._model.logits_B1V, self._model.tokens_B1
        assert logits_B1V is not None and tokens_B1 is not None, "the sampler runs after a one-token forward"
        if self._model.is_apart:
            return self._one_by_one(rows, logits_B1V[:, -1, :], tokens_B1)
        plan = self._plan
        if plan is None or rows is not self._rows or plan.expired:
            self._rows, self._plan = rows, (plan := self._planned(rows, logits_B1V.shape[-1]))
        self._model.logits_B1V = None
        drawn = plan.drawn(logits_B1V[:, -1, :], tokens_B1, self._model.versions, self._model.same)
        drawn[1].routes_BW = self._model.take_routes()
        tokens_B, draw = _given_out(*drawn)
        for index, row in enumerate(rows):
            row.draws.append((draw, index))
            row.position += 1
        return tokens_B

    def _one_by_one(self, rows: tuple[Row, ...], logits_BV: mx.array, inputs_B1: mx.array) -> mx.array:
        """Draw for each row by itself, so that sums and sorts over its tokens have one shape in any batch."""
        vocab = logits_BV.shape[-1]
        plans = self._plans if rows is self._rows else [self._planned((row,), vocab) for row in rows]
        self._rows, self._plans = rows, plans
        self._model.logits_B1V = None
        tokens = []
        for at, row in enumerate(rows):
            plan = plans[at] = self._planned((row,), vocab) if plans[at].expired else plans[at]
            one = slice(at, at + 1)
            token_1, draw = plan.drawn(logits_BV[one], inputs_B1[one], self._model.versions[one], None)
            tokens.append(token_1)
            row.draws.append((draw, 0))
            row.position += 1
        tokens_B = mx.concatenate(tokens)
        mx.async_eval(tokens_B, *(array for row in rows for array in row.draws[-1][0].arrays))  # type: ignore[no-untyped-call]
        return tokens_B

    def ahead(self, places: Places, logits_NV: mx.array, inputs_N: mx.array) -> tuple[mx.array, Draw]:
        """Tokens [N] of the latest forward's rows at places ahead of them; `inputs_N` are the ids that were fed there.

        The rows themselves stay.
        """
        self._plan = None  # what it counts step by step is out of date now
        rows, vocab = self._model.rows, logits_NV.shape[-1]
        numbers = self._plain.numbers(rows)
        if numbers is None:
            plan = self._planned(places.rows(), vocab)
        else:
            positions_B = np.array([row.position for row in rows], np.int64)
            plan = self._plan_ahead(numbers, places.index, positions_B[places.index] + places.steps, vocab)
        versions = tuple(map(self._model.versions.__getitem__, places.index.tolist()))
        return _given_out(*plan.drawn(logits_NV, inputs_N[:, None], versions, self._model.same))

    def are_plain(self, rows: tuple[Row, ...]) -> bool:
        """True if `unread` can draw for these rows."""
        return self._plain.numbers(rows) is not None

    def unread(self, positions_BL: mx.array, logits_NV: mx.array, inputs_N: mx.array) -> tuple[mx.array, Draw]:
        """As `ahead`, of plain rows, at positions (uint64) that only the device knows; the caller gives it out."""
        self._plan = None
        width, numbers = positions_BL.shape[1], self._plain.numbers(self._model.rows)
        assert numbers is not None, "plain rows"
        plan = self._plan_ahead(numbers, width, None, logits_NV.shape[-1])
        noise_N1 = uniforms_at(numbers.seeds_B1, positions_BL).reshape(-1, 1)
        versions = tuple([version for version in self._model.versions for _ in range(width)])
        return plan.drawn(logits_NV, inputs_N[:, None], versions, self._model.same, noise_N1)

    def _planned(
        self, rows: tuple[Row, ...], vocab: int, plain: tuple[Numbers, Indices | None] | None = None
    ) -> SamplingPlan:
        return SamplingPlan(rows, vocab, self._candidates, plain, halves=self._halves)

    def _plan_ahead(
        self, numbers: Numbers, index: Indices | int, positions_N: Indices | None, vocab: int
    ) -> SamplingPlan:
        """Plan draws at N places of plain rows. `index`: the row of each place, or how many places each row has.

        Where that is as in the latest step, only positions differ.
        """
        same = index if isinstance(index, int) else index.tobytes()
        if self._ahead is None or self._ahead[0] is not numbers or self._ahead[1] != same:
            at = np.repeat(np.arange(len(numbers)), index) if isinstance(index, int) else index
            self._ahead = numbers, same, self._planned((), vocab, (numbers.at(at), positions_N))
        else:
            self._ahead[2].begin(positions_N)
        return self._ahead[2]


def _given_out(tokens_B: mx.array, draw: Draw) -> tuple[mx.array, Draw]:
    """Now, or reading them a step later would queue behind the next forward."""
    mx.async_eval(tokens_B, *draw.arrays)  # type: ignore[no-untyped-call]
    return tokens_B, draw


@dataclass(frozen=True)
class Places:
    """Where tokens of a batch's rows are drawn in one step, row by row; N of them."""

    index: Indices  # of each place's row
    steps: Indices  # ahead of that row
    rows: Callable[[], tuple[Row, ...]]  # as they will be there (`Row.ahead`)


class Guesses:
    """Draws of a set of rows step by step, whose tokens are not read: `Row.ahead` says where each of them stands.

    Whatever gives the logits, the noise is that of each row's seed and position.
    """

    def __init__(self, rows: tuple[Row, ...], vocab: int, candidates: int = 256) -> None:
        self._rows = rows
        self._plan = SamplingPlan(rows, vocab, candidates)

    def draw(self, logits_BV: mx.array, inputs_B: mx.array) -> mx.array:
        """The next token of each [B] uint32; `inputs_B` are the ids that were fed."""
        tokens_B = self._plan.draw(logits_BV.astype(mx.float32), inputs_B[:, None])
        for row in self._rows:
            row.position += 1
        return tokens_B


class SamplingPlan:
    """Tensors of one set of rows. F: rows with top_k or top_p. S: rows that are not greedy. T: top_logprobs."""

    def __init__(
        self,
        rows: tuple[Row, ...],
        vocab: int,
        candidates: int,
        plain: tuple[Numbers, Indices | None] | None = None,
        *,
        halves: bool = False,
    ) -> None:
        """`plain`: numbers and positions of places in plain rows, which are not looked at then.

        Positions may be None where noise comes with each draw. `halves`: thresholds are found so, not by a sort of all.
        """
        self._halves = halves
        self._edits = LogitEdits(rows, vocab)
        self._penalties = Penalties(rows, vocab)
        self._tokens = TokenMasks(rows, vocab)
        self._masks = GrammarMasks(rows, vocab)
        self._asked = NamedTokens([row.sampling for row in rows])
        self._steps_left = self._edits.steps_valid or -1
        numbers, positions = plain or (Numbers.of(rows), np.array([row.position for row in rows], np.int64))
        drawn = numbers.drawn
        self._drawn, self._places = _Subset(drawn, len(numbers)), drawn
        self._noise_steps = NOISE_STEPS if plain is None else 1  # plain rows' places are given in each step
        self.begin(positions)
        self._bare = self._bare_S = _Subset([], len(numbers))
        if drawn:
            self._prepare_draw(numbers if self._drawn.is_all else numbers.at(np.array(drawn)), vocab, candidates)
        wanted = [index for index, row in enumerate(rows) if row.sampling.top_logprobs]
        self._top = _Subset(wanted, len(rows))
        self._top_index = {index: at for at, index in enumerate(wanted)}
        self.reported = _Reported(rows, drawn)
        self._top_count = min(max((rows[index].sampling.top_logprobs or 0 for index in wanted), default=0), vocab)
        self._tells_others = bool(self._top_count or self._asked.ids or not self.reported.is_empty)
        if drawn and draws.are_there():
            bare = [at for at in self._unfiltered if plain or rows[drawn[at]].is_unedited]
            self._bare_S, self._bare = _Subset(bare, len(drawn)), _Subset([drawn[at] for at in bare], len(numbers))

    def begin(self, positions: Indices | None) -> None:
        """Draw for these positions of the rows next."""
        if positions is not None and not self._drawn.is_empty:
            self._positions_S = positions if self._drawn.is_all else positions[self._places]
        self._noise_at = self._noise_steps  # none is made yet

    @property
    def expired(self) -> bool:
        """True if a row has reached its min_tokens, so that the logit edits must be rebuilt."""
        return self._steps_left == 0

    def _prepare_draw(self, numbers: Numbers, vocab: int, candidates: int) -> None:
        self._seeds_S = numbers.seeds
        tempered = bool((numbers.temperature != 1).any())
        self._inverse_temperature_S1 = _column(1 / numbers.temperature) if tempered else None
        self._smallest_S1 = mx.full((len(numbers), 1), SMALLEST)
        self._min_p_S1 = _column(numbers.min_p) if bool((numbers.min_p > 0).any()) else None
        filtered = numbers.filtered(vocab)
        self._filtered = _Subset(filtered, len(numbers))
        keeps_all = numbers.min_p <= 0
        keeps_all[filtered] = False
        self._unfiltered: list[int] = np.flatnonzero(keeps_all).tolist()
        if filtered:
            self._prepare_filters(numbers.at(np.array(filtered)), vocab, candidates)

    def _prepare_filters(self, numbers: Numbers, vocab: int, candidates: int) -> None:
        top_k = np.where((numbers.top_k > 0) & (numbers.top_k < vocab), numbers.top_k, vocab)
        top_p = np.where(numbers.top_p < 1, np.maximum(numbers.top_p, 1e-9), 2.0)
        self._top_k_F1 = mx.array(top_k.astype(np.int32))[:, None] if top_k.min() < vocab else None
        self._top_p_F1 = _column(top_p) if top_p.min() < 1 else None
        few = np.flatnonzero(top_k <= candidates).tolist() if on_metal() and vocab > candidates * BLOCK else []
        self._few, self._others = (
            _Subset(each, len(numbers)) for each in (few, np.flatnonzero(top_k > candidates).tolist() if few else [])
        )
        # On a GPU a partition is a full sort, so nothing is gained by taking fewer candidates; but where a row's own
        # top_k is certain to be among them, they are found by blocks.
        sort_all = vocab <= SORT_ALL_BELOW or not on_cpu()
        sort_all = sort_all or bool(((candidates < top_k) & (top_k < vocab)).any())
        self._vocab, self._few_candidates = vocab, candidates
        self._candidates = vocab if sort_all else candidates
        self._may_overflow = not sort_all and top_k.max() == vocab

    def drawn(
        self,
        logits_BV: mx.array,
        inputs_B1: mx.array,
        versions: tuple[str, ...],
        same: Callable[[mx.array], mx.array] | None,
        noise_B1: mx.array | None = None,
    ) -> tuple[mx.array, Draw]:
        """Token ids [B] uint32, and what is reported of them; `inputs_B1`: the ids that were fed.

        `noise_B1`: None: that of the rows' seeds and positions.
        Log-probabilities of all tokens are made only where a row asks for more than those of its own: logits are large.
        `same`: makes the drawn tokens those of the leading rank, where there are several.
        """
        uniforms_S1 = None
        if not self._drawn.is_empty:
            uniforms_S1 = self._noise() if noise_B1 is None else self._drawn.of(noise_B1)
        bare = None
        if same is None and uniforms_S1 is not None and not self._bare.is_empty and draws.is_for(logits_BV):
            bare = self._draw_bare(logits_BV, uniforms_S1)
            if self._bare.is_all and not self._tells_others:
                return bare[0], Draw(versions, bare[1], None, {}, NamedLogprobs(self._asked, None))
        logits_BV = logits_BV.astype(mx.float32)
        tokens_B = self.draw(logits_BV, inputs_B1, uniforms_S1)
        tokens_B = tokens_B if same is None else same(tokens_B)
        tokens_B = tokens_B if bare is None else self._bare.put(tokens_B, bare[0])  # whatever other rows there are
        totals_B1 = mx.logsumexp(logits_BV, axis=-1, keepdims=True)
        top_TK = asked_N = None
        if self._tells_others:
            logprobs_BV = self.reported.of(logits_BV - totals_B1)
            logprobs_B1 = mx.take_along_axis(logprobs_BV, tokens_B[:, None], axis=-1)
            top_TK, asked_N = self._most_likely(logprobs_BV), self._asked.of(logprobs_BV)
        else:
            logprobs_B1 = mx.take_along_axis(logits_BV, tokens_B[:, None], axis=-1) - totals_B1
        logprobs_B = logprobs_B1[:, 0]
        return tokens_B, Draw(versions, logprobs_B, top_TK, self._top_index, NamedLogprobs(self._asked, asked_N))

    def _draw_bare(self, logits_BV: mx.array, uniforms_S1: mx.array) -> tuple[mx.array, mx.array]:
        """Tokens and log-probabilities of rows that draw from all that the model says, by a kernel of ours."""
        by_S1 = self._inverse_temperature_S1
        inverse_N1 = None if by_S1 is None else self._bare_S.of(by_S1)
        return draws.drawn(self._bare.of(logits_BV), self._bare_S.of(uniforms_S1), inverse_N1)

    def draw(self, logits_BV: mx.array, inputs_B1: mx.array, uniforms_S1: mx.array | None = None) -> mx.array:
        """Token ids [B] uint32 of logits in fp32; `inputs_B1` are the ids that were fed."""
        self._steps_left -= 1
        if not self._edits.is_empty:
            logits_BV = self._edits.apply(logits_BV)
        if not self._penalties.is_empty:
            logits_BV = self._penalties.apply(logits_BV, inputs_B1[:, 0])
        if not self._tokens.is_empty:
            logits_BV = self._tokens.apply(logits_BV, inputs_B1[:, 0])
        if not self._masks.is_empty:
            logits_BV = self._masks.apply(logits_BV, inputs_B1)
        self.reported.keep_edited(logits_BV)
        if self._drawn.is_empty:
            return mx.argmax(logits_BV, axis=-1)
        tokens_S = self._draw(self._drawn.of(logits_BV), uniforms_S1)
        if self._drawn.is_all:
            return tokens_S
        return self._drawn.put(mx.argmax(logits_BV, axis=-1), tokens_S)

    def _draw(self, logits_SV: mx.array, uniforms_S1: mx.array | None) -> mx.array:
        if self._inverse_temperature_S1 is not None:
            logits_SV = logits_SV * self._inverse_temperature_S1
        chances_SV = mx.softmax(logits_SV, axis=-1)
        smallest_S1 = self._smallest_S1
        if not self._filtered.is_empty:
            smallest_S1 = self._filtered.put(smallest_S1, self._nucleus(self._filtered.of(chances_SV)))
        if self._min_p_S1 is not None:
            limit_S1 = self._min_p_S1 * mx.max(chances_SV, axis=-1, keepdims=True)
            smallest_S1 = mx.maximum(smallest_S1, limit_S1)
        self.reported.keep_drawn(logits_SV, chances_SV, smallest_S1)
        if uniforms_S1 is None:
            uniforms_S1 = self._noise()
        if self._filtered.is_empty and self._min_p_S1 is None:
            return draw_of_all(chances_SV, uniforms_S1)
        return draw_by_chance(chances_SV, smallest_S1, uniforms_S1)

    def _noise(self) -> mx.array:
        """Noise of the next step, [S, 1]. It is drawn for several steps at once: numpy takes as long for one."""
        at, steps = self._noise_at, self._noise_steps
        if at == steps:
            positions_KS = self._positions_S + np.arange(steps)[:, None]
            noises_N1 = uniforms(np.tile(self._seeds_S, steps), positions_KS.ravel())
            self._noises_KS1, at = noises_N1.reshape(*positions_KS.shape, 1), 0
            self._positions_S = self._positions_S + steps
        self._noise_at = at + 1
        return self._noises_KS1[at]

    def _nucleus(self, chances_FV: mx.array) -> mx.array:
        k_F1, p_F1 = self._top_k_F1, self._top_p_F1
        if not self._few.is_empty:
            return mx.maximum(self._by_blocks(chances_FV), SMALLEST)
        candidates = self._candidates
        threshold_F1, enough_F1 = self._threshold(chances_FV, k_F1, p_F1, candidates)
        while self._may_overflow and enough_F1 is not None and not mx.all(enough_F1).item():
            candidates *= MORE
            threshold_F1, enough_F1 = self._threshold(chances_FV, k_F1, p_F1, candidates)
        return mx.maximum(threshold_F1, SMALLEST)

    def _threshold(
        self, chances_FV: mx.array, k_F1: mx.array | None, p_F1: mx.array | None, candidates: int
    ) -> tuple[mx.array, mx.array | None]:
        if self._halves and candidates >= self._vocab > SORT_ALL_BELOW:
            return nucleus_by_halving(chances_FV, k_F1, p_F1), None
        return nucleus_threshold(chances_FV, k_F1, p_F1, candidates)

    def _by_blocks(self, chances_FV: mx.array) -> mx.array:
        """Thresholds where some rows' candidates are found by blocks: a row's own top_k decides, not the others."""
        found_F1 = mx.zeros((chances_FV.shape[0], 1))
        for rows, candidates, by_blocks in (
            (self._few, self._few_candidates, True),
            (self._others, self._vocab, False),
        ):
            if not rows.is_empty:
                k_F1, p_F1 = (None if each is None else rows.of(each) for each in (self._top_k_F1, self._top_p_F1))
                those_FV = rows.of(chances_FV)
                threshold_F1, _ = (
                    nucleus_threshold(those_FV, k_F1, p_F1, candidates, by_blocks=True)
                    if by_blocks
                    else self._threshold(those_FV, k_F1, p_F1, candidates)
                )
                found_F1 = rows.put(found_F1, threshold_F1)
        return found_F1

    def _most_likely(self, logprobs_BV: mx.array) -> tuple[mx.array, mx.array] | None:
        """Ids and log-probabilities [T, K] of the rows that asked for them."""
        if self._top_count == 0:
            return None
        return most_likely(self._top.of(logprobs_BV), self._top_count)


class _Reported:
    """The rows whose log-probabilities are those of what they draw from; a batch without such rows pays nothing.

    A greedy row draws from nothing: of it, those after the edits of its logits are meant (vLLM's choice).
    """

    def __init__(self, rows: tuple[Row, ...], drawn: list[int]) -> None:
        asked = [index for index, row in enumerate(rows) if row.sampling.logprobs_mode == "processed_logprobs"]
        place = {index: at for at, index in enumerate(drawn)} if asked else {}
        self._greedy = _Subset([index for index in asked if index not in place], len(rows))
        self._drawn = _Subset([index for index in asked if index in place], len(rows))
        self._among_drawn = _Subset([place[index] for index in asked if index in place], len(drawn))
        self._parts: list[tuple[_Subset, mx.array]] = []
        self.is_empty = not asked

    def keep_edited(self, logits_BV: mx.array) -> None:
        """The logits after all edits."""
        if not self._greedy.is_empty:
            self._parts.append((self._greedy, self._greedy.of(logits_BV)))

    def keep_drawn(self, logits_SV: mx.array, chances_SV: mx.array, smallest_S1: mx.array) -> None:
        """Store the tempered logits of rows that are not greedy, without tokens whose chance is below `smallest_S1`."""
        if not self._drawn.is_empty:
            kept_PV = self._among_drawn.of(chances_SV) >= self._among_drawn.of(smallest_S1)
            self._parts.append((self._drawn, mx.where(kept_PV, self._among_drawn.of(logits_SV), -mx.inf)))

    def of(self, logprobs_BV: mx.array) -> mx.array:
        """Log-probabilities to report, [B, V]: the given ones, or the processed ones for rows that want those."""
        parts, self._parts = self._parts, []
        for rows, logits_PV in parts:
            logprobs_PV = logits_PV - mx.logsumexp(logits_PV, axis=-1, keepdims=True)
            logprobs_BV = rows.put(logprobs_BV, mx.maximum(logprobs_PV, LOWEST))
        return logprobs_BV


class _Subset:
    """Some rows of a batch; costs nothing when it is all of them."""

    def __init__(self, indices: list[int], size: int) -> None:
        self.is_empty = not indices
        self.is_all = len(indices) == size
        if indices and not self.is_all:
            self._indices = mx.array(indices)

    def of(self, values: mx.array) -> mx.array:
        """The subset's rows of `values`."""
        return values if self.is_all else values[self._indices]

    def put(self, values: mx.array, part: mx.array) -> mx.array:
        """`values` with the subset's rows replaced by `part`."""
        if self.is_all:
            return part
        out = mx.array(values)
        out[self._indices] = part
        return out


def _column(values: Floats) -> mx.array:
    return mx.array(values.astype(np.float32)[:, None])
