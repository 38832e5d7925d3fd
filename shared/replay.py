"""Replay: what an ended sequence's tokens should have been, by a second computation; plain functions of plain data.

A row's draw depends on its own scores, seed and position alone, so a worker with the same weights and the same adapter
version draws the same token again, unless two tokens are so close that the last bits of a sum decide. Three verdicts:

- same: the replay drew this token, and its probability differs by the bound at most;
- tie: the replay drew another one, and the recorded one would have been drawn had probabilities moved by the bound;
- wrong: neither.

Tokens after a swap of the adapter, whose row went on with the KV of an earlier version, cannot be computed again from
what is recorded: they are not judged.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from shared.noise import mix_seeds, uniforms
from shared.sequences import LEAST_TEMPERATURE, SamplingParams, SequenceResult, SequenceSpec

BOUNDS = {
    "float32": 1e-3
}  # of probability, by the dtype of a model; tests/bench/replay.py measures what rounding moves
BOUND_16_BIT = 0.05
MOST_DIFFERENCES = 32  # of one sequence, after which no more of its tokens are judged

Chances = npt.NDArray[np.float64]


def bound_of(dtype: str) -> float:
    """Difference of probability that rounding may make, for a model of this dtype."""
    return BOUNDS.get(dtype, BOUND_16_BIT)


def replayed_part(spec: SequenceSpec, recorded: SequenceResult, start: int, end: int, version: str) -> SequenceSpec:
    """The sequence that draws tokens [start, end) of a recorded one again, without drafts; its id is to be set."""
    sampling = msgspec.structs.replace(spec.sampling, max_tokens=end, top_logprobs=None, prompt_logprobs=None)
    return msgspec.structs.replace(
        spec,
        sampling=sampling,
        sequence_class="batch",
        group="",
        api="",
        adapter=version,
        adapter_policy="pin",
        deadline_ms=0,
        first_token_deadline_ms=0,
        collect=None,
        trace="",
        has_next_turn=False,
        prediction_ids=(),
        prior_ids=recorded.completion_ids[:start],
        record_s=0,
        fresh=True,
        cache=False,
    )


def with_all_chances(part: SequenceSpec, vocab: int) -> SequenceSpec:
    """The same of one token, with the probability that every token had before filters: edited, by temperature."""
    sampling = msgspec.structs.replace(
        part.sampling,
        max_tokens=len(part.prior_ids) + 1,
        top_logprobs=vocab,
        logprob_token_ids=(),
        logprobs_mode="processed_logprobs",
        top_k=0,
        top_p=1.0,
        min_p=0.0,
    )
    return msgspec.structs.replace(part, sampling=sampling)


def chances_of(result: SequenceResult, vocab: int) -> Chances:
    """Probabilities [vocab] from the answer to `with_all_chances`."""
    chances = np.zeros(vocab)
    for each in result.top_logprobs[-1]:
        chances[each.token] = math.exp(each.logprob) if each.logprob > -1e3 else 0.0
    total = chances.sum()
    return chances / total if total else chances


def gap_of(chances: Chances, sampling: SamplingParams, position: int, token: int) -> float:
    """By how much probabilities must move so that `token` is drawn at this position; 0 if it is drawn as they are.

    Greedy rows take the largest. Others draw by inverse CDF in the order of token ids among what top_k, top_p and min_p
    leave; where the filters' last decision falls the other way, what must move for that counts, too.
    """
    if sampling.temperature < LEAST_TEMPERATURE:
        return float(chances.max() - chances[token])
    if not chances[token]:
        return 1.0
    noise = float(uniforms(mix_seeds([sampling.seed]), np.array([position]))[0])
    return min(max(moved, _gap_among(chances, kept, noise, token)) for moved, kept in _kept_sets(chances, sampling))


def _gap_among(chances: Chances, kept: Sequence[int], noise: float, token: int) -> float:
    """Distance of the draw from the token's part of the CDF, among the kept tokens; 1 if it is none of them."""
    if token not in kept:
        return 1.0
    ids = np.sort(np.array(kept))
    cumulative = np.cumsum(chances[ids])
    cumulative /= cumulative[-1]
    at = int(np.searchsorted(ids, token))
    low, high = (cumulative[at - 1] if at else 0.0), cumulative[at]
    return float(max(low - noise, noise - high, 0.0))


def _kept_sets(chances: Chances, sampling: SamplingParams) -> list[tuple[float, list[int]]]:
    """Tokens that the filters leave, with 0; and what they leave if probabilities move by the number before it."""
    order = np.argsort(-chances, kind="stable")
    order = order[chances[order] > 0]
    ordered = chances[order]
    count = most = min(len(order), sampling.top_k or len(order))
    moved: dict[int, float] = {}  # other numbers of tokens, and what must move for them
    if sampling.top_p < 1:
        mass = np.cumsum(ordered[:most])
        goal = sampling.top_p * mass[-1]
        count = min(most, int(np.searchsorted(mass, goal)) + 1)
        moved |= {n: float(abs(mass[n - 1] - goal)) for n in (count - 1, count) if 0 < n < most}
        moved = {(n if n < count else n + 1): by for n, by in moved.items()}
    if sampling.min_p:
        threshold = sampling.min_p * ordered[0]
        enough = int((ordered >= threshold).sum())
        if enough <= count:
            moved = {
                n: float(abs(ordered[at] - threshold))
                for n, at in ((enough - 1, enough - 1), (enough + 1, enough))
                if 0 < n <= count
            }
            count = enough
    sets = [(0.0, list(map(int, order[:count])))]
    sets += [(by, list(map(int, order[:n]))) for n, by in moved.items() if n != count]
    if 0 < count < len(order):  # the last one that is left and the first one that is not change places
        sets.append((float(ordered[count - 1] - ordered[count]), [*map(int, order[: count - 1]), int(order[count])]))
    return sets
