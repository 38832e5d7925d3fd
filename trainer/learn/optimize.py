"""One train step: gradients over microbatches, one update (adam.py) per minibatch and epoch.

Invariants.
- A train step is a generator that yields after every microbatch, with everything evaluated. Whoever runs it decides
  what happens in between: nothing (a process of its own), or decode steps (hosted in a worker).
- With one update the ratio is taken against mu, the sampler's log-probabilities. With several, minibatches or epochs,
  against logpi_v from a pass before the first one, and the truncated weight of v against mu corrects the rest: never
  both on one ratio. Epochs have the same minibatches, each in an order of its own.
- With `ratio` "trainer" it is always against such a pass, and what the present policy sampled weighs 1: mu, whose last
  bits depend on the batch that a token was decoded in, is left out, and an on-policy run repeats to the byte.
- A gradient that is not finite changes nothing: the update is left out and the report says so.
- With a value head (PPO) a pass before the first update says the values of all tokens. From these and the rewards come
  advantages (GAE), which are then shifted to mean 0 over the train step's tokens (`judged`, `shifted`), and what
  values should have been. So values are the present policy's, not those of the older one that may have sampled: they
  know more, and the ratio alone corrects for who sampled.
- Two distances are reported apart. *Mismatch* is logpi_v - logmu with the weights v that sampled the token: other
  kernels, other batches. *Staleness* is logpi_theta - logpi_v: what training has changed since.
"""

import math
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import structlog

from mlx_model.device import on_cpu, on_cuda
from trainer.learn.adam import AdamSteps, StepSizes, added
from trainer.learn.advantages import ValueSums, of_tokens, taught_advantages
from trainer.learn.batches import PADDING, STD_EPSILON, Microbatch, Padding, SampleGroup, microbatches, pad
from trainer.learn.logprobs import (
    BatchArrays,
    TokenScores,
    head_chunk,
    to_arrays,
)
from trainer.learn.losses import (
    LOSSES,
    LossInputs,
    StepTotals,
    k3,
    token_average,
    truncated_weights,
    value_errors,
)
from trainer.learn.measures import Distances, measure, weights_in
from trainer.learn.microbatch_size import MicrobatchSize
from trainer.learn.options import OptimizeOptions, ValueOptions
from trainer.learn.policy import Policy
from trainer.learn.steps import StepPlan, StepReport, Sums
from trainer.state import Arrays

log = structlog.get_logger()

BYTES_PER_WIDTH = 12  # per position, and input or output of a linear layer; seen: 6 to 13, before one was measured
_EPOCHS = 1  # number in the seed of their order, with seed and step
CUDA_PADDING = Padding(32, 32, rows=True, last=1)  # a new shape takes several times as long as a known one


@dataclass(frozen=True)
class Prepared:
    """A microbatch with what stays constant over the train step."""

    asked: int  # positions that it was cut to
    batch: Microbatch
    arrays: BatchArrays
    old_BT: mx.array
    weight_BT: mx.array | None
    reference_BT: mx.array | None
    values_BT: mx.array | None = None  # before the train step, likewise the next two
    advantage_BT: mx.array | None = None
    returns_BT: mx.array | None = None  # what the values should have been


def padding() -> Padding:
    """How microbatches are filled up on this device."""
    return CUDA_PADDING if on_cuda() else PADDING


class Optimizer:
    """AdamW over a policy's adapter. Belongs to the policy's thread."""

    def __init__(self, policy: Policy, options: OptimizeOptions) -> None:
        self.policy = policy
        self.options = options
        if options.routing_replay:
            policy.replay_routes()
        chunk = head_chunk(policy.base)
        if options.value is not None and not chunk:
            raise ValueError("this model shows no hidden states, so no value head can read them")
        self.scores = partial(policy.scores, chunk=chunk)
        self._padding = padding()
        widths = [value.shape[-2 if name.endswith("lora_a") else -1] for name, value in policy.arrays().items()]
        self._size = MicrobatchSize(
            options.microbatch_tokens, options.microbatch_s, options.microbatch_bytes, BYTES_PER_WIDTH * sum(widths)
        )
        self._told_of_memory = False
        self._waited_s = math.inf  # that others have computed since the latest microbatch
        self._compiled = set[tuple[int, ...]]()  # layouts of microbatches
        self.adam = AdamSteps(policy.model, None if options.value is None else _is_head, are_constant=True)

    def train_step(
        self,
        groups: Sequence[SampleGroup],
        step: int,
        *,
        policy_step: int = 0,
        older: dict[int, Arrays] | None = None,
    ) -> Generator[None, None, StepReport]:
        """Learn from `groups`; `step` sets the learning rate and the order of minibatches.

        `policy_step` is the present policy's; `older` holds the weights of earlier policy steps, for the distances.
        """
        started = time.perf_counter()
        before = self.policy.weights()
        yield
        plan, peers = self.plan(groups, step), self.policy.peers
        if plan.totals.tokens == 0:
            return StepReport(updated=False)
        plan = replace(plan, minis=[peers.groups(mini) for mini in plan.minis])
        distances = yield from self.distances(plan, step, policy_step, older or {})
        ahead: list[list[Prepared]] = []
        if self.looks_ahead(plan):
            for mini in plan.minis:
                ahead.append((yield from self.prepare(mini, policy_step, several=plan.several)))
        known, values = None, self.options.value
        if values is not None:
            known = ValueSums(*peers.numbers(astuple(judged(ahead, values))))
            shifted(ahead, values, known)
        sums = Sums()
        for at in plan.order:
            # What needs no pass ahead is cut one by one, to sizes that follow what the ones before have taken.
            prepared = ahead[at] if ahead else self.each_prepared(plan.minis[at], policy_step)
            gradient = yield from self.gradient(prepared, plan.parts[at], sums)
            yield from self.apply(gradient, plan.rate, sums)
        sums.put(peers.numbers(sums.added()))
        return self.report(plan, sums, before, time.perf_counter() - started, distances, known)

    # -- a train step's pieces, for computing it in parts

    def plan(self, groups: Sequence[SampleGroup], step: int) -> StepPlan:
        """Divide the groups of a train step into updates; touches no array."""
        minis = self._minibatches(groups, step)
        parts = [self._totals(mini) for mini in minis]
        return StepPlan(
            minis, self._order(len(minis), step), self._totals(groups), parts, self.options.schedule.rate(step)
        )

    def distances(
        self, plan: StepPlan, step: int, policy_step: int, older: dict[int, Arrays]
    ) -> Generator[None, None, Distances | None]:
        """Distances between sampler and policy, if they are measured in this step."""
        if not self.options.distances_every or step % self.options.distances_every:
            return None
        batches = [batch for mini in plan.minis for _, batch in self._cut(mini)]
        return (yield from measure(self.policy, self.scores, batches, policy_step, older))

    def looks_ahead(self, plan: StepPlan) -> bool:
        """True if a pass over all of the step comes before its first update."""
        options = self.options
        own = options.ratio == "trainer" or options.loss.kl_coefficient > 0
        return plan.several or own or options.value is not None

    def prepare(
        self, groups: Sequence[SampleGroup], policy_step: int, *, several: bool
    ) -> Generator[None, None, list[Prepared]]:
        """Microbatches with their scores by the weights before the step's first update."""
        prepared = []
        for cut in self.policy.peers.each(self._cut(groups)):
            if cut is not None:
                prepared.append(self._prepare(*cut, policy_step, several=several))
            yield
        return prepared

    def each_prepared(self, groups: Sequence[SampleGroup], policy_step: int) -> Iterator[Prepared]:
        """The same one by one, where no pass ahead is needed."""
        return (self._prepare(*cut, policy_step) for cut in self._cut(groups))

    def _cut(self, groups: Sequence[SampleGroup]) -> Iterator[tuple[int, Microbatch]]:
        """Microbatches, each with the size it was cut to."""
        asked = 0

        def size() -> int:
            nonlocal asked
            asked = self._size.positions
            return asked

        for part in microbatches(groups, size):
            yield asked, pad(part, self._padding)

    def _minibatches(self, groups: Sequence[SampleGroup], step: int) -> list[list[SampleGroup]]:
        """Groups in an order drawn from (seed, step), in equal parts; a group is never split between two updates."""
        count = min(self.options.minibatches, len(groups))
        if count <= 1:
            return [list(groups)] if groups else []
        order = np.random.default_rng((self.options.seed, step)).permutation(len(groups))
        return [[groups[i] for i in part] for part in np.array_split(order, count)]

    def _order(self, minibatches: int, step: int) -> list[int]:
        """Places of the minibatches that are learned from, one after the other, in all epochs."""
        draw = np.random.default_rng((self.options.seed, step, _EPOCHS))
        further = [draw.permutation(minibatches).tolist() for _ in range(self.options.epochs - 1)]
        return [*range(minibatches), *(at for epoch in further for at in epoch)]

    def _totals(self, groups: Sequence[SampleGroup]) -> StepTotals:
        masks = [sample.mask for group in groups for sample in group.samples]
        return StepTotals(
            sequences=sum(any(mask) for mask in masks),
            tokens=sum(sum(mask) for mask in masks),
            max_tokens=self.options.max_completion,
        )

    def _prepare(self, asked: int, batch: Microbatch, policy_step: int, several: bool = False) -> Prepared:
        arrays = to_arrays(batch, self.policy.sight)
        old_BT, weight_BT, reference_BT, values_BT = arrays.sampler_BT, None, None, None
        own = self.options.ratio == "trainer"
        if several or own or self.policy.value is not None:
            before = self.scores(self.policy.model, arrays, entropy=False, value=self.policy.value)
            values_BT = before.values_BT
            mx.eval(before.logp_BT, *(() if values_BT is None else (values_BT,)))
        if several or own:
            old_BT = before.logp_BT
            bound = self.options.loss.truncation
            corrected_BT = arrays.mask_BT
            if own:
                corrected_BT = corrected_BT & mx.array(batch.policy_step_BT != policy_step)
            weight_BT = truncated_weights(old_BT, arrays.sampler_BT, corrected_BT, bound, self.options.loss.level)
            mx.eval(old_BT, weight_BT)
        if self.options.loss.kl_coefficient:
            with weights_in(self.policy, self.policy.origin) as reference:
                reference_BT = self.scores(reference, arrays, entropy=False).logp_BT
                mx.eval(reference_BT)
        advantage_BT = None
        if batch.teacher_BT is not None:
            taught_BT = batch.teacher_BT - batch.sampler_BT
            advantage_BT = mx.array(taught_advantages(batch.advantage_B, taught_BT, self.options.teaching))
        return Prepared(asked, batch, arrays, old_BT, weight_BT, reference_BT, values_BT, advantage_BT)

    def gradient(self, batches: Iterable[Prepared], totals: StepTotals, sums: Sums) -> Generator[None, None, Any]:
        """Accumulated over microbatches; None without a token in the loss."""
        gradient: Any = None
        if totals.tokens == 0:
            return gradient
        for prepared in self.policy.peers.each(batches):
            if prepared is None:
                yield
                continue
            started, held = time.perf_counter(), mx.get_active_memory()
            mx.reset_peak_memory()
            found, part = self.policy.value_and_grad(self._loss, totals.tokens, prepared, totals)
            loss, entropy, clipped, kl, value = found
            gradient = added(gradient, part)
            mx.eval(loss, entropy, clipped, kl, value, gradient)
            sums.loss += loss.item()
            sums.entropy += entropy.item()
            sums.clipped += clipped.item()
            sums.kl += kl.item()
            sums.value += value.item()
            self._measured(prepared, time.perf_counter() - started, mx.get_peak_memory() - held)
            ended = time.perf_counter()
            yield
            self._waited_s = time.perf_counter() - ended
        return self.policy.nothing() if gradient is None else gradient

    def apply(self, gradient: Any, rate: float, sums: Sums) -> Generator[None, None, None]:
        """One clipped AdamW update; None changes nothing."""
        if gradient is None:
            return
        options = self.options
        sizes = StepSizes(
            rate,
            options.adam_betas,
            options.weight_decay,
            max_grad_norm=options.max_grad_norm,
            apart_rate=0.0 if options.value is None else rate * options.value.rate,
        )
        norm, updated = self.adam.update(self.policy.whole(gradient), sizes)
        if not updated:
            sums.nonfinite += 1
            return
        self.policy.agree()
        sums.grad_norm = max(sums.grad_norm, norm)
        yield

    def _measured(self, prepared: Prepared, seconds: float, nbytes: int) -> None:
        batch, bound = prepared.batch, self._size.bound_bytes
        waited_s, self._waited_s = self._waited_s, math.inf
        if self._size.bound_s:
            seconds, held, waited_s = self.policy.same(seconds, nbytes, waited_s)
            nbytes = int(held)
        layout = batch.layout
        is_new = not on_cpu() and layout not in self._compiled
        self._compiled.add(layout)
        took = batch.positions, batch.tokens, seconds, nbytes
        self._size.took(prepared.asked, *took, waited_s=waited_s, is_new=is_new)
        if bound and nbytes > bound and len(batch.completion_BT) == 1 and not self._told_of_memory:
            self._told_of_memory = True
            advice = "a sample is never cut: gradient_checkpointing takes less, microbatch_gb allows more"
            log.warning("training.sample_takes_memory", positions=batch.positions, bytes=nbytes, bound=bound, do=advice)

    def _loss(
        self, model: Any, prepared: Prepared, totals: StepTotals
    ) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        """Loss, and for the report: entropy, clipped tokens, KL to the base, loss of the values."""
        options, x = self.options.loss, prepared.arrays
        learns = "all" if options.entropy_bonus else self.policy.learns
        scores: TokenScores = self.scores(model, x, value=self.policy.value, learns=learns)
        inputs = LossInputs(
            scores.logp_BT, prepared.old_BT, x.mask_BT, x.advantage_B, prepared.weight_BT, prepared.advantage_BT
        )
        parts = LOSSES[options.name](inputs, options, totals)
        loss = parts.loss
        kl = mx.array(0.0)
        if prepared.reference_BT is not None:
            kl_BT = k3(scores.logp_BT, prepared.reference_BT, x.mask_BT)
            loss = loss + options.kl_coefficient * token_average(kl_BT, x.mask_BT, options.name, totals)
            kl = mx.where(x.mask_BT, kl_BT, 0.0).sum()
        if options.entropy_bonus:
            bonus = token_average(scores.entropy_BT, x.mask_BT, options.name, totals)
            loss = loss - options.entropy_bonus * bonus
        entropy = mx.where(x.mask_BT, mx.stop_gradient(scores.entropy_BT), 0.0).sum()
        value, head = mx.array(0.0), self.options.value
        if head is not None and scores.values_BT is not None:
            assert prepared.values_BT is not None and prepared.returns_BT is not None, "`judged` was called"
            errors_BT = value_errors(scores.values_BT, prepared.values_BT, prepared.returns_BT, head.clip)
            value = 0.5 * token_average(errors_BT, x.mask_BT, options.name, totals)
            loss = loss + head.coefficient * value
        return loss, entropy, parts.clipped_BT.sum(), mx.stop_gradient(kl), mx.stop_gradient(value)

    def report(
        self,
        plan: StepPlan,
        sums: Sums,
        before: Arrays,
        seconds: float,
        distances: Distances | None,
        known: ValueSums | None = None,
    ) -> StepReport:
        """Report of the step; `before` are the weights that it began with, `known` the sums of a value head."""
        totals, updates = plan.totals, len(plan.order)
        seen = totals.tokens * self.options.epochs
        return StepReport(
            updated=sums.nonfinite < updates,
            loss=sums.loss / updates,
            learning_rate=plan.rate,
            grad_norm=sums.grad_norm,
            update_rms=rms_change(before, self.policy.weights()),
            entropy=sums.entropy / seen,
            clip_fraction=sums.clipped / seen,
            kl=sums.kl / seen,
            tokens=totals.tokens,
            sequences=totals.sequences,
            seconds=seconds,
            distances=distances,
            nonfinite_gradients=sums.nonfinite,
            value_loss=None if known is None else sums.value / updates,
            explained=None if known is None else known.explained,
        )


def _is_head(name: str) -> bool:
    return name.startswith("heads.")


def judged(ahead: list[list[Prepared]], options: ValueOptions) -> ValueSums:
    """Set each token's advantage and return in place, and return their sums.

    Values are those of before the step's first update, whichever version has sampled: a baseline may be any function of
    the state, and the newest head fits the present policy best (Andrychowicz et al., arXiv 2006.05990 section 3.5).
    """
    sums = ValueSums()
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # rewards too large: the gate refuses a gradient that is not finite
        for mini in ahead:
            for at, prepared in enumerate(mini):
                batch, values_BT = prepared.batch, np.array(prepared.values_BT)
                found_BT = of_tokens(batch.advantage_B, values_BT, batch.mask_BT, options.discount, options.decay)
                returns_BT = found_BT + values_BT
                sums = sums.plus(ValueSums.of(found_BT[batch.mask_BT], returns_BT[batch.mask_BT]))
                mini[at] = replace(prepared, advantage_BT=mx.array(found_BT), returns_BT=mx.array(returns_BT))
    return sums


def shifted(ahead: list[list[Prepared]], options: ValueOptions, sums: ValueSums) -> None:
    """Give advantages mean 0 over all of the train step's tokens, whose sums these are, in place.

    Dividing by their deviation, too, is the usual way, but once all samples earn the same they are only what the values
    are wrong by, and would be made as large as ever.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scale = sums.deviation + STD_EPSILON if options.scale == "std" else 1.0
        for mini in ahead:
            for at, prepared in enumerate(mini):
                advantage_BT = (np.array(prepared.advantage_BT, np.float64) - sums.mean) / scale
                mini[at] = replace(prepared, advantage_BT=mx.array(advantage_BT.astype(np.float32)))


def rms_change(before: Arrays, after: Arrays) -> float:
    """Root mean square over all parameters of the difference of two adapters."""
    squares = sum(float(np.square(after[name] - before[name], dtype=np.float64).sum()) for name in before)
    count = sum(value.size for value in before.values())
    return math.sqrt(squares / count)
