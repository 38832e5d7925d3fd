"""The computation of tuning: the loss of one part of a batch, what is right of what is held out. Belongs to the MLX
thread.

The reference of dpo is what the run begins with: the base, or the version of `--start-from`. Its log-probabilities are
computed without gradients, of each pair once.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import numpy as np

from mlx_model.sites import Whole
from shared.trajectories import Trajectory
from trainer.learn.batches import SampleGroup, pad
from trainer.learn.compute import Work
from trainer.learn.logprobs import (
    BatchArrays,
    from_logits,
    halves_of,
    head_chunk,
    row_states,
    to_arrays,
)
from trainer.learn.losses import answer_logps, cross_entropy, margins, preference_loss
from trainer.learn.measures import measure_parity, measure_probe_kl, weights_in
from trainer.learn.options import AdapterShape
from trainer.learn.peers import Peers
from trainer.learners.calls import exposed
from trainer.learners.data import DataLearner, DataOptions, ItemSize, Measured, policy_of
from trainer.learners.tuning_examples import Tuning
from trainer.rollouts.sight import Sight
from trainer.state import Arrays

T = TypeVar("T")
_Pair = tuple[tuple[int, ...] | tuple[bytes, ...], ...]  # keys of images, prompt, chosen, rejected


class _Predictions(NamedTuple):
    """Predictions of the model for the tokens that count in some rows."""

    logp: float  # sum
    named: int  # tokens that it would have chosen itself
    tokens: int


class RowLearner(DataLearner[T]):
    """A LoRA that learns from rows of tokens; `group`: the rows of an item."""

    def __init__(
        self,
        model: Any,
        shape: AdapterShape,
        options: DataOptions,
        sight: Sight | None = None,
        whole: Whole | None = None,
    ) -> None:
        """`sight`: what it sees images with, None: its items have none; `whole`: see `Policy`."""
        self.policy = policy_of(model, shape, options, sight, whole)
        self._chunk = head_chunk(self.policy.base)
        super().__init__(options, {"body": self.policy.model})

    @abstractmethod
    def group(self, item: T) -> SampleGroup:
        """The rows of an item, with the tokens that count."""

    @exposed
    def parity(self, trajectories: Sequence[Trajectory]) -> Work[float]:
        """Mean difference to a worker's log-probabilities of what it has sampled."""
        return measure_parity(self.policy, trajectories)

    @exposed
    def base_kl(self, texts: Sequence[Sequence[int]]) -> Work[float]:
        """Mean KL(base || present) of next-token distributions at the last positions of texts, in nats."""
        (distance,) = yield from measure_probe_kl(self.policy, [None], texts)
        return distance

    def weights(self) -> Arrays:
        return self.policy.weights()

    def config(self) -> bytes:
        return self.policy.config()

    def digest(self) -> int:
        return self.policy.digest()

    def load(self, weights: Arrays) -> None:
        self.policy.load(weights)

    @property
    def _peers(self) -> Peers:
        return self.policy.peers

    def whole(self, gradients: dict[str, Any]) -> dict[str, Any]:
        return {"body": self.policy.whole(gradients["body"])}

    def _agree(self) -> None:
        self.policy.agree()

    def _arrays(self, part: Sequence[T]) -> BatchArrays:
        return to_arrays(pad([self.group(item) for item in part]), self.policy.sight)

    def _size(self, item: T) -> ItemSize:
        group = self.group(item)
        longest = max(len(sample.completion_ids) for sample in group.samples)
        return ItemSize(len(group.samples), len(group.prompt_ids) + longest)

    def _tokens(self, items: Sequence[T]) -> int:
        return sum(sum(sample.mask) for item in items for sample in self.group(item).samples)


class TuneLearner(RowLearner[SampleGroup]):
    """A LoRA, by cross entropy or by preferences."""

    def __init__(self, model: Any, tuning: Tuning, shape: AdapterShape, beta: float, options: DataOptions,
        sight: Sight | None = None, whole: Whole | None = None,
    ) -> None:  # fmt: skip
        self._tuning, self._beta = tuning, beta
        super().__init__(model, shape, options, sight, whole)
        self.scores = partial(self.policy.scores, chunk=self._chunk, entropy=False)
        self._references: dict[_Pair, tuple[float, float]] = {}

    def group(self, item: SampleGroup) -> SampleGroup:
        return item

    # -- learning

    def begin_with(self, weights: Arrays) -> None:
        super().begin_with(weights)
        self.policy.origin, self._references = weights, {}

    def measure(self, items: Sequence[SampleGroup]) -> Work[Measured]:
        """For sft, the share of tokens predicted and their loss; for dpo, the share of pairs that gained, loss and
        margin.
        """
        if self._tuning == "sft":
            said: list[_Predictions] = []
            for part in self._own_parts(items):
                if part is not None:
                    said.append(self._predicted(self._arrays(part)))
                yield
            own = [sum(each) for each in zip(_Predictions(0.0, 0, 0), *said, strict=True)]
            logp, named, tokens = self._peers.numbers(own)
            return Measured(named / tokens, -logp / tokens)
        gained: list[float] = []
        loss = 0.0
        for part in self._own_parts(items):
            if part is not None:
                margin_N = self._margins(self.policy.model, self._arrays(part), self._reference(part))
                gained += np.array(margin_N).tolist()
                loss += np.array(preference_loss(margin_N, len(items))).item()
            yield
        right, loss, margin = self._peers.numbers([sum(each > 0 for each in gained), loss, sum(gained)])
        return Measured(right / len(items), loss, margin / len(items))

    # -- batches

    def gradient(self, part: Sequence[SampleGroup], items: Sequence[SampleGroup]) -> tuple[Any, dict[str, Any]]:
        reference_B = self._reference(part) if self._tuning == "dpo" else None
        whole = len(items) if self._tuning == "dpo" else self._tokens(items)
        value, gradients = self.policy.value_and_grad(self._loss, whole, self._arrays(part), reference_B, whole)
        return value, {"body": gradients}

    def _loss(self, model: Any, x: BatchArrays, reference_B: mx.array | None, whole: int) -> mx.array:
        if reference_B is None:
            return cross_entropy(self.scores(model, x).logp_BT, x.mask_BT, whole)
        return preference_loss(self._margins(model, x, reference_B), whole)

    def _margins(self, model: Any, x: BatchArrays, reference_B: mx.array) -> mx.array:
        return margins(answer_logps(self.scores(model, x).logp_BT, x.mask_BT), reference_B, self._beta)

    def _reference(self, part: Sequence[SampleGroup]) -> mx.array:
        """Log-probability [B] of each answer by what the run began with."""
        pairs = [_pair(item) for item in part]
        if new := [item for item, pair in zip(part, pairs, strict=True) if pair not in self._references]:
            with weights_in(self.policy, self.policy.origin) as model:
                x = self._arrays(new)
                said: list[float] = np.array(answer_logps(self.scores(model, x).logp_BT, x.mask_BT)).tolist()
            for item, chosen, rejected in zip(new, said[0::2], said[1::2], strict=True):
                self._references[_pair(item)] = chosen, rejected
        return mx.array([logp for pair in pairs for logp in self._references[pair]])

    def _predicted(self, x: BatchArrays) -> _Predictions:
        """Row by row as a worker reads them; the head sees the positions that count alone."""
        body, head = halves_of(self.policy.model, self._chunk)
        rows, places = np.nonzero(np.array(x.mask_BT))
        before = np.array(x.start_B)[rows] - 1 + places
        targets_N = x.completion_BT[mx.array(rows), mx.array(places)]
        hidden_NH = row_states(self.policy.model, body, x)[mx.array(rows), mx.array(before)]
        step = self._chunk or len(rows)
        logp, named = 0.0, 0
        for at in range(0, len(rows), step):
            logits_NV, targets = head(hidden_NH[None, at : at + step])[0], targets_N[at : at + step]
            logp += np.array(from_logits(logits_NV, targets, entropy=False)[0]).sum(dtype=np.float64).item()
            named += int(np.array(mx.argmax(logits_NV, axis=-1) == targets).sum())
        return _Predictions(logp, named, len(rows))


def _pair(item: SampleGroup) -> _Pair:
    return (
        tuple(image.key for image in item.images),
        item.prompt_ids,
        *(sample.completion_ids for sample in item.samples),
    )
