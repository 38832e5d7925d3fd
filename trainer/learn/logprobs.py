"""Log-probabilities of completions under a model, with gradients.

Two ways, same numbers. *Shared*: each prompt runs once, and what its layers hold then, gradient included, is handed to
all samples of its group: keys and values, of windows their last ones, and recurrent states. With G samples of T tokens
after a prompt of S tokens that is S + G T positions where rows of their own need G (S + T); logits exist for completion
positions only. Prompts share a forward, padded on the left, but where a layer would read the padding into its state. On
CUDA completions are computed in it, too, where all layers have full attention and no images or experts are given.
*Rows*: prompt and completion as one row, for models with caches of other kinds, and under gradient checkpointing.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from mlx_model.kv.kinds import leaves, mapped
from mlx_model.kv.padded import Masks
from mlx_model.kv.shared import Form, Groups
from trainer.learn.batches import Microbatch, Sample, SampleGroup, pad
from trainer.learn.drawing import DrawnPositions, DrawnRows, as_drawn, positions_of
from trainer.learn.picture_places import Laid, Shown, behind, looking, shown
from trainer.learn.prompt_kv import OnePass, PromptKeys
from trainer.learn.routes import Routes, of_prompts, of_rest, of_rows, replay_of, replaying
from trainer.rollouts.sight import Sight

# Bytes of a layer's keys and values that rows must spare by reading prompts where they are, or it is no faster than
# copies. On a CPU (fp32): 1.07 of the time at 4 MB, 0.98 at 31 MB, 0.7 at 126 MB.
LEAST_SPARED = 32 << 20
LEAST_WIDTH = 8  # of the pieces of prompts and completions in one forward pass
_CLOSE = 0.02  # of the largest log-probability: how far the two ways may be apart, by rounding
CHUNK_LOGITS = 1 << 26  # at most as many logits at once: 256 MB in fp32


class TokenScores(NamedTuple):
    """Scores in fp32 for each completion position."""

    logp_BT: mx.array
    entropy_BT: mx.array  # of the whole next-token distribution, tempered and filtered where the target was
    values_BT: mx.array | None = None  # of the states that the tokens were drawn in, from a value head


Learns = Literal["all", "logp"]  # which scores need gradients
# How rows read prompts: where they are, in a form of this model's leaves, if that pays; or copies of them, in shapes of
# which MLX's fused attention has gradients (mlx_model/kv/padded.py), in one forward pass with the prompts if it can be.
Reads = Form | Literal["fused"]
ValueOf = Callable[[mx.array], mx.array]  # hidden states [..., H] in fp32 to values [..., 1]


class Halves(NamedTuple):
    """A model in two: `head(body(tokens, cache=...))` are its logits."""

    body: Callable[..., mx.array]
    head: Callable[[mx.array], mx.array]


def head_chunk(model: Any) -> int:
    """Positions that the head may take at once; 0 when this model cannot be cut in two, and its logits come whole."""
    halves = cut(model)
    if halves is None:
        return 0
    tokens_BL = mx.array([[1, 0, 1]])
    try:
        whole_BLV, again_BLV = model(tokens_BL), halves.head(halves.body(tokens_BL))
        same = whole_BLV.shape == again_BLV.shape and bool(mx.allclose(whole_BLV, again_BLV, rtol=1e-2, atol=1e-2))
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return 0
    return max(1, CHUNK_LOGITS // whole_BLV.shape[-1]) if same else 0


def cut(model: Any) -> Halves | None:
    """Body and head of an mlx-lm model, as it stands now; None when it has no body that can be called.

    The head is the model's own forward pass around a body that hands through what it is given: scales and soft caps
    that stand there are part of it.
    """
    whole = getattr(model, "language_model", model)
    body = getattr(whole, "model", None)
    if not callable(body):
        return None
    head = copy.copy(whole)
    head.model = _HandingThrough(body)
    return Halves(body, head)


def token_scores(
    head: Callable[[mx.array], mx.array],
    hidden_BTH: mx.array,
    targets_BT: mx.array,
    chunk: int,
    *,
    entropy: bool = True,
    drawn: DrawnPositions | None = None,
    learns: Learns = "all",
) -> TokenScores:
    """Log-probability of each target and the entropy there; `chunk` positions at a time, 0: all at once.

    With `drawn` they are of the distribution that a sampler draws from. If log-probabilities alone learn, what depends
    on the head's own parameters has no gradient.
    """
    if not chunk or targets_BT.size <= chunk:
        return TokenScores(*from_logits(head(hidden_BTH), targets_BT, entropy=entropy, drawn=drawn))
    hidden_NH, targets_N = hidden_BTH.reshape(-1, hidden_BTH.shape[-1]), targets_BT.reshape(-1)
    drawn_N = None if drawn is None else drawn.flat()
    count = len(targets_N)
    step = math.ceil(count / math.ceil(count / chunk))

    def scores_from(at: int) -> tuple[mx.array, mx.array]:
        # Targets come by the closure: a checkpoint differentiates all of its inputs.
        def scores(part_NH: mx.array) -> tuple[mx.array, mx.array]:
            part = None if drawn_N is None else drawn_N.part(at, at + step)
            return from_logits(head(part_NH[None])[0], targets_N[at : at + step], entropy=entropy, drawn=part)

        made: Callable[[mx.array], tuple[mx.array, mx.array]] = (
            _with_slopes(scores) if learns == "logp" else mx.checkpoint(scores)
        )
        return made(hidden_NH[at : at + step])

    parts = [scores_from(at) for at in range(0, count, step)]
    logp_BT, entropy_BT = (
        mx.concatenate(list(values)).reshape(targets_BT.shape) for values in zip(*parts, strict=True)
    )
    return TokenScores(logp_BT, entropy_BT)


def _with_slopes(
    scores: Callable[[mx.array], tuple[mx.array, mx.array]],
) -> Callable[[mx.array], tuple[mx.array, mx.array]]:
    """`scores` of positions [N, H] with gradients of the first ones only, for which no logits are stored or computed
    again: a log-probability depends on its own position alone, so its derivative [H] is computed along with it.
    """

    def once(hidden_NH: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        entropies = list[mx.array]()

        def logps(hidden_NH: mx.array) -> mx.array:
            logp_N, entropy_N = scores(hidden_NH)
            entropies.append(entropy_N)
            return logp_N

        (logp_N,), (slopes_NH,) = mx.vjp(logps, [hidden_NH], [mx.ones(len(hidden_NH))])
        return logp_N, entropies[0], slopes_NH

    both: Any = mx.custom_function(once)

    def backward(hidden_NH: mx.array, cotangents: Any, outputs: Any) -> mx.array:
        slopes_NH: mx.array = outputs[2]
        gradient_NH: mx.array = (cotangents[0][:, None] * slopes_NH).astype(hidden_NH.dtype)
        return gradient_NH

    both.vjp(backward)
    return lambda hidden_NH: both(hidden_NH)[:2]


def from_logits(
    logits: mx.array, targets: mx.array, *, entropy: bool = True, drawn: DrawnPositions | None = None
) -> tuple[mx.array, mx.array]:
    """Log-probabilities of targets [...] and entropies (zeros unless asked for) out of logits [..., V], in fp32."""
    logits = logits.astype(mx.float32)
    if drawn is not None:
        logits = as_drawn(logits, targets, drawn)
    total = mx.logsumexp(logits, axis=-1)
    chosen = mx.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    if not entropy:
        return chosen - total, mx.zeros_like(total)
    p = mx.exp(logits - total[..., None])
    return chosen - total, total - (p * logits).sum(axis=-1)


class _HandingThrough:
    """Stands for a model's body: gives back its input, and is the body in everything else."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def __call__(self, hidden: mx.array, *_: Any, **__: Any) -> mx.array:
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


@dataclass(frozen=True)
class BatchArrays:
    """A microbatch as MLX arrays."""

    prompt_PS: mx.array
    padding_P: mx.array
    prompt_of_B: mx.array
    completion_BT: mx.array
    mask_BT: mx.array
    sampler_BT: mx.array
    advantage_B: mx.array
    rows_BL: mx.array  # prompt and completion as one right-padded row
    start_B: mx.array  # position of the first completion token in rows_BL
    drawn: DrawnRows | None = None  # what the rows were drawn with
    seen: Shown | None = None  # where images stand in prompts; None: they have none
    routes_BTN: Routes | None = None  # experts that a model with a `Replay` computes with


def to_arrays(batch: Microbatch, sight: Sight | None = None) -> BatchArrays:
    """Arrays for the thread that calls; `sight`: for prompts with images."""
    rows_BL, start_B = _rows(batch)
    seen = None
    if batch.images:
        assert sight is not None, "a policy that sees nothing has no prompts with images"
        length = batch.completion_BT.shape[1]
        laid = Laid(batch.prompt_PS, batch.padding_P, batch.prompt_of_B, rows_BL, start_B, length)
        seen = shown(laid, batch.image_token, sight.seen(batch.images))
    return BatchArrays(
        mx.array(batch.prompt_PS),
        mx.array(batch.padding_P),
        mx.array(batch.prompt_of_B),
        mx.array(batch.completion_BT),
        mx.array(batch.mask_BT),
        mx.array(batch.sampler_BT),
        mx.array(batch.advantage_B),
        mx.array(rows_BL),
        mx.array(start_B),
        batch.drawn,
        seen,
        batch.routes_BTN,
    )


def can_share_prompts(model: Any, *, tries: bool = True) -> bool:
    """True if `shared_scores` gives this model's log-probabilities.

    So it does where all state is keys and values of full attention, and positions before the first one harm nothing.
    That, and models with windows or recurrent layers, are tried with a few tokens, if `tries`. Else models that are
    known not to bear such positions share none.
    """
    if _has_only_keys(model):
        return _bears_padding(model) if tries else not _scales_by_position(model)
    new = leaves(make_prompt_cache(model))
    known = all(type(leaf) in (KVCache, RotatingKVCache, ArraysCache) and not getattr(leaf, "keep", 0) for leaf in new)
    return known and tries and _is_right(model)


def _has_only_keys(model: Any) -> bool:
    """True if all state is keys and values of full attention."""
    return all(type(leaf) is KVCache for leaf in leaves(make_prompt_cache(model)))


def _bears_padding(model: Any) -> bool:
    """False if a position before the first one makes numbers that are none."""
    caches = mapped(make_prompt_cache(model), lambda leaf: PromptKeys(mx.array([2])))
    try:
        return not mx.isnan(model(mx.array([[0, 0, 1]]), cache=caches)).any().item()
    except Exception:  # masks and state of the model's own
        return False


def _scales_by_position(model: Any) -> bool:
    """True of attention scaled by the logarithm of a position, which has none before the first one (Ministral 3)."""
    all_args = (getattr(module, "args", None) for _, module in model.named_modules())
    return any("llama_4_scaling_beta" in (getattr(args, "rope_parameters", None) or {}) for args in all_args)


def _is_right(model: Any) -> bool:
    def sample(*ids: int) -> Sample:
        return Sample(ids, (0.0,) * len(ids), (True,) * len(ids), (0,) * len(ids), 0.0)

    x = to_arrays(
        pad([SampleGroup("a", (1, 2, 3), (sample(4, 5, 6), sample(7))), SampleGroup("b", (8,), (sample(9, 1),))])
    )
    try:
        shared_BT, rows_BT = (
            mx.where(x.mask_BT, scores(model, x, entropy=False).logp_BT, 0.0) for scores in (shared_scores, row_scores)
        )
        return bool((mx.max(mx.abs(shared_BT - rows_BT)) < _CLOSE * mx.max(mx.abs(rows_BT))).item())
    except Exception:  # masks and state of the model's own
        return False


def shared_scores(
    model: Any,
    x: BatchArrays,
    *,
    entropy: bool = True,
    chunk: int = 0,
    value: ValueOf | None = None,
    reads: Reads | None = None,
    learns: Learns = "all",
) -> TokenScores:
    """Each prompt once, then all completions after it; the head takes `chunk` positions at a time, 0: all at once.

    `reads`: None: rows copy keys and values, and attention is as MLX chooses.
    """
    body, head = halves_of(model, chunk)
    has_states = any(type(leaf) is ArraysCache for leaf in leaves(make_prompt_cache(model)))
    if has_states and x.seen is not None:
        return row_scores(model, x, entropy=entropy, chunk=chunk, value=value, learns=learns)
    hidden_BTH = (_prompt_by_prompt if has_states else _behind_prompts)(model, body, x, reads)
    drawn = positions_of(x.drawn, x.completion_BT.shape)
    scores = token_scores(head, hidden_BTH, x.completion_BT, chunk, entropy=entropy, drawn=drawn, learns=learns)
    return scores._replace(values_BT=_values(value, hidden_BTH))


def _behind_prompts(model: Any, body: Callable[..., mx.array], x: BatchArrays, reads: Reads | None) -> mx.array:
    """Hidden states [B, T, H] in which completions are drawn."""
    if reads == "fused" and (hidden_BTH := _with_prompts(model, body, x)) is not None:
        return hidden_BTH
    masks = Masks() if reads == "fused" else None
    caches = mapped(make_prompt_cache(model), lambda leaf: _learning(leaf, x.padding_P, masks))
    replay = replay_of(model)
    routes_PSW = of_prompts(replay, x.routes_BTN, x.prompt_of_B, x.prompt_PS.shape[1])
    with looking(model, x.prompt_PS, x.seen, x.seen and x.seen.prompts) as images, replaying(replay, routes_PSW):
        first_PH = body(x.prompt_PS, cache=caches, **images)[:, -1]
    hidden_BTH = first_PH[x.prompt_of_B][:, None]
    if x.completion_BT.shape[1] == 1:
        return hidden_BTH
    branches = _branches(caches, x, None if reads == "fused" else reads)
    routes_BTW = of_rest(replay, x.routes_BTN)
    with behind(model, x.seen, x.completion_BT.shape[1] - 1), replaying(replay, routes_BTW):
        rest_BTH = body(x.completion_BT[:, :-1], cache=branches)
    return mx.concatenate([hidden_BTH, rest_BTH], axis=1)


def _with_prompts(model: Any, body: Callable[..., mx.array], x: BatchArrays) -> mx.array | None:
    """The same in one forward pass: where positions are few, its time is that of starting operations.

    None where that cannot be.
    """
    lengths = x.prompt_PS.shape[1], x.completion_BT.shape[1] - 1
    is_plain = body is not model and x.seen is None and x.routes_BTN is None and _has_only_keys(model)
    if not is_plain or lengths[1] == 0 or math.gcd(*lengths) < LEAST_WIDTH:
        return None
    pieces = OnePass(x.padding_P, x.prompt_of_B, lengths)
    ids_NW = pieces.joined([x.prompt_PS[..., None], x.completion_BT[:, :-1, None]])[..., 0]
    try:
        states_NWH = body(ids_NW, cache=mapped(make_prompt_cache(model), lambda leaf: pieces))
    except NotImplementedError:  # masks of the model's own
        return None
    prompts_PSH, rest_BTH = pieces.apart(states_NWH)
    return mx.concatenate([prompts_PSH[:, -1][x.prompt_of_B][:, None], rest_BTH], axis=1)


def _prompt_by_prompt(model: Any, body: Callable[..., mx.array], x: BatchArrays, reads: Reads | None) -> mx.array:
    """The same, each prompt without padding."""
    prompt_of_B: list[int] = x.prompt_of_B.tolist()  # type: ignore[assignment]
    parts, order = [], list[int]()
    for prompt in sorted(set(prompt_of_B)):
        rows = [row for row, of in enumerate(prompt_of_B) if of == prompt]
        one = replace(
            x,
            prompt_PS=x.prompt_PS[prompt : prompt + 1, x.padding_P[prompt].item() :],
            padding_P=mx.zeros(1, mx.int32),
            prompt_of_B=mx.zeros(len(rows), mx.int32),
            completion_BT=x.completion_BT[mx.array(rows)],
            routes_BTN=None if x.routes_BTN is None else x.routes_BTN[rows],
        )
        parts.append(_behind_prompts(model, body, one, reads))
        order += rows
    return mx.concatenate(parts)[mx.array(np.argsort(order))]


def _learning(new: Any, padding_P: mx.array, masks: Masks | None) -> Any:
    """A cache of prompts in the place of an empty one of mlx-lm, through which gradients pass."""
    return new if type(new) is ArraysCache else PromptKeys(padding_P, getattr(new, "max_size", None), masks)


def _branches(caches: list[Any], x: BatchArrays, form: Form | None) -> list[Any]:
    """The caches of rows that continue the prompts of these."""
    prompts: list[int] = x.prompt_of_B.tolist()  # type: ignore[assignment]
    starts: list[int] = x.padding_P.tolist()  # type: ignore[assignment]
    spared = max((leaf.nbytes for leaf in leaves(caches) if _is_whole(leaf)), default=0) * (
        len(prompts) / len(starts) - 1
    )
    groups = Groups(tuple((prompt,) for prompt in prompts))
    is_read_in_place = form is not None and x.seen is None and spared >= LEAST_SPARED

    def branch(leaf: Any) -> Any:
        if type(leaf) is ArraysCache:
            twin = ArraysCache(len(leaf.cache))
            twin.cache = [None if state is None else state[x.prompt_of_B] for state in leaf.cache]
            return twin
        if is_read_in_place and _is_whole(leaf):
            return leaf.continued(groups, starts, form)
        return leaf.branch(x.prompt_of_B)

    return mapped(caches, branch)


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, PromptKeys) and leaf.window is None


def row_scores(
    model: Any,
    x: BatchArrays,
    *,
    entropy: bool = True,
    chunk: int = 0,
    value: ValueOf | None = None,
    learns: Learns = "all",
) -> TokenScores:
    """Prompt and completion in one forward pass a row; the head takes `chunk` positions at a time, 0: all at once."""
    body, head = halves_of(model, chunk)
    hidden_BLH = row_states(model, body, x)
    targets_BL = x.rows_BL[:, 1:]
    drawn = positions_of(x.drawn, targets_BL.shape)
    scores = token_scores(head, hidden_BLH, targets_BL, chunk, entropy=entropy, drawn=drawn, learns=learns)
    at_BT = x.start_B[:, None] - 1 + mx.arange(x.completion_BT.shape[1])[None]
    at_BT = mx.minimum(at_BT, hidden_BLH.shape[1] - 1)
    logp_BT, entropy_BT = (mx.take_along_axis(each, at_BT, axis=1) for each in (scores.logp_BT, scores.entropy_BT))
    values_BL = _values(value, hidden_BLH)
    values_BT = None if values_BL is None else mx.take_along_axis(values_BL, at_BT, axis=1)
    return TokenScores(logp_BT, entropy_BT, values_BT)


def row_states(model: Any, body: Callable[..., mx.array], x: BatchArrays) -> mx.array:
    """Hidden states [B, L, H] of the rows but for their last id, as `body` of the model gives them."""
    ids_BL = x.rows_BL[:, :-1]
    replay = replay_of(model)
    routes_BLW = of_rows(replay, x.routes_BTN, x.start_B, ids_BL.shape[1])
    until = x.seen and x.seen.rows.until(ids_BL.shape[1])
    with looking(model, ids_BL, x.seen, until) as images, replaying(replay, routes_BLW):
        return body(ids_BL, **images)


def _values(value: ValueOf | None, hidden_BTH: mx.array) -> mx.array | None:
    return None if value is None else value(hidden_BTH.astype(mx.float32))[..., 0]


def halves_of(model: Any, chunk: int) -> Halves:
    """Where the model is not cut in two, logits take the place of hidden states."""
    halves = cut(model) if chunk else None
    return halves or Halves(model, lambda logits: logits)


def _rows(batch: Microbatch) -> tuple[np.ndarray, np.ndarray]:
    prompt_width = batch.prompt_PS.shape[1]
    start_B = prompt_width - batch.padding_P[batch.prompt_of_B]
    rows_BL = np.zeros((len(start_B), prompt_width + batch.completion_BT.shape[1]), np.int32)
    for row, (prompt, start) in enumerate(zip(batch.prompt_of_B, start_B, strict=True)):
        rows_BL[row, :start] = batch.prompt_PS[prompt, prompt_width - start :]
        rows_BL[row, start : start + batch.completion_BT.shape[1]] = batch.completion_BT[row]
    return rows_BL, start_B.astype(np.int32)
