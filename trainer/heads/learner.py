"""One train step of a head, and what it gets right. Belongs to the MLX thread; plain data goes in and out."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from shared.adapter_files.config import mlx_config
from shared.errors import SetupError
from shared.heads import HeadKind, HeadSpec
from trainer.heads.examples import Example, Form, Text
from trainer.heads.network import HeadNet, Net, arrays_of, load_arrays, padded
from trainer.learn.compute import Work
from trainer.learn.logprobs import cut
from trainer.learn.options import AdapterShape, HeadSettings, Schedule
from trainer.learn.policy import Policy, share_tree
from trainer.state import Arrays, Moments, Snapshot

Outputs = npt.NDArray[np.float32]


class HeadOptions(NamedTuple):
    """Constants of every train step."""

    head: HeadSettings
    schedule: Schedule
    shape: AdapterShape | None  # of the LoRA; None: the head learns alone
    microbatch_tokens: int
    max_grad_norm: float
    weight_decay: float
    adam_betas: tuple[float, float]
    seed: int
    checkpoint_layers: bool = False


class HeadReport(NamedTuple):
    """What one train step did."""

    loss: float
    grad_norm: float
    is_finite: bool  # else nothing was changed


class HeadLearner:
    """Head and LoRA, and the weights to fall back to."""

    def __init__(self, model: Any, form: Form, labels: Sequence[str], start: float, options: HeadOptions) -> None:
        self._form, self._options, self._name = form, options, options.head.head
        self._policy = self._policy_of(model, options)
        body = share_tree(model) if self._policy is None else self._policy.model
        if self._policy is None:
            body.freeze()
            body.eval()
        halves = cut(body)
        if halves is None:
            raise SetupError("this model shows no hidden states, so no head can read them")
        inputs = int(halves.body(mx.zeros((1, 1), mx.int32)).shape[-1])
        hidden = options.head.head_hidden
        kind: HeadKind = "labels" if form == "labels" else "scalar"
        try:
            self.spec = HeadSpec(kind, tuple(labels), "gelu" if hidden else "", inputs=inputs, hidden=hidden)
        except ValueError as error:
            raise SetupError(f"bad settings: {error}") from error
        self._head = HeadNet(self.spec, start=start, seed=options.seed)
        self._net = Net(body, self._head, halves.body)
        self._gradient = nn.value_and_grad(self._net, self._loss)
        self._reset()
        self._good, self._good_moments = self.weights(), self._kept()

    @staticmethod
    def _policy_of(model: Any, options: HeadOptions) -> Policy | None:
        if options.shape is None:
            return None
        try:
            return Policy(model, options.shape, seed=options.seed, checkpoint_layers=options.checkpoint_layers)
        except ValueError as error:  # a target that the model has not, DoRA on experts
            raise SetupError(f"bad settings: {error}") from error

    # -- learning

    def train(self, examples: Sequence[Example], step: int) -> Work[HeadReport]:
        """One update; `step` sets the learning rates."""
        loss, gradients = 0.0, None
        for part in self._parts(examples):
            value, more = self._gradient(*self._batch(part), len(examples))
            gradients = more if gradients is None else tree_map(mx.add, gradients, more)
            mx.eval(value, gradients)
            loss += float(value.item())
            yield
        clipped, norm = optim.clip_grad_norm(gradients, self._options.max_grad_norm)
        if not np.isfinite(float(norm.item())) or not np.isfinite(loss):
            return HeadReport(loss, float(norm.item()), is_finite=False)
        rate = self._options.schedule.rate(step)
        share = self._options.head.head_learning_rate / self._options.schedule.peak
        self._of_head.learning_rate, self._of_body.learning_rate = rate * share, rate
        self._of_head.update(self._net.head, clipped["head"])
        if self._policy is not None:
            self._of_body.update(self._net.body, clipped["body"])
        mx.eval(self._net.trainable_parameters(), self._of_head.state, self._of_body.state)
        return HeadReport(loss, float(norm.item()), is_finite=True)

    def right(self, examples: Sequence[Example]) -> Work[float]:
        """Of pairs, the share that is ranked as people did; of scores, of two at a time; of labels, the share named."""
        said: list[Outputs] = []
        for part in self._parts(examples):
            ids_BL, last_B, _ = self._batch(part)
            said.append(np.array(self._net(ids_BL, last_B)))
            yield
        return share_right(self._form, np.concatenate(said), [example.target for example in examples])

    def read(self, texts: Sequence[Text]) -> Work[list[list[float]]]:
        """What the head says of each text."""
        said: list[list[float]] = []
        for text in texts:
            said.append(np.array(self._net(*padded([text.ids])))[0].tolist())
            yield
        return said

    # -- weights

    def weights(self) -> Arrays:
        """A copy as plain data."""
        own = self._policy.weights() if self._policy is not None else {}
        return own | arrays_of(self._head, self._name)

    def config(self) -> bytes:
        """`adapter_config.json` of them."""
        shape, heads = self._options.shape, {self._name: self.spec}
        if shape is None or self._policy is None:
            return mlx_config("head", 0, 0.0, (), heads)
        return mlx_config(shape.kind, shape.rank, shape.scale, tuple(self._policy.modules), heads)

    def snapshot(self) -> Snapshot:
        """All of the state, for a checkpoint."""
        return Snapshot(self.weights(), self.config(), self._moments())

    def restore(self, snapshot: Snapshot, good: Arrays | None = None) -> None:
        """Go on exactly where a checkpoint was taken; `good`: the last good weights, where those are others."""
        self._load(snapshot.adapter)
        state = tree_unflatten([(name, mx.array(value)) for name, value in snapshot.optimizer.items()])
        self._of_head.state, self._of_body.state = state["head"], state.get("body", {})
        self.accept()
        self._good = good or self._good

    def accept(self) -> None:
        """The present weights are the last good ones."""
        self._good, self._good_moments = self.weights(), self._kept()

    def revert(self) -> None:
        """Back to the last good weights and their moments."""
        self._load(self._good)
        self._of_head.state, self._of_body.state = self._good_moments

    def _load(self, weights: Arrays) -> None:
        if self._policy is not None:
            self._policy.load({name: value for name, value in weights.items() if not name.startswith("heads.")})
        load_arrays(self._head, self._name, weights)

    def _reset(self) -> None:
        betas, decay = list(self._options.adam_betas), self._options.weight_decay
        self._of_head, self._of_body = (
            optim.AdamW(learning_rate=0.0, betas=betas, weight_decay=decay, bias_correction=True) for _ in range(2)
        )
        self._of_head.init(self._net.head.trainable_parameters())
        if self._policy is not None:
            self._of_body.init(self._net.body.trainable_parameters())

    def _kept(self) -> tuple[Any, Any]:
        """Arrays are shared, since an update replaces them."""
        head, body = (tree_map(lambda value: value, each.state) for each in (self._of_head, self._of_body))
        return head, body

    def _moments(self) -> Moments:
        state: dict[str, Any] = {"head": self._of_head.state}
        if self._policy is not None:
            state["body"] = self._of_body.state
        return {name: np.array(value) for name, value in tree_flatten(state)}

    # -- batches

    def _parts(self, examples: Sequence[Example]) -> Iterator[list[Example]]:
        """In order, as many at once as the padded positions allow; at least one."""
        part: list[Example] = []
        for example in examples:
            longest = max(len(text.ids) for each in (*part, example) for text in each.texts)
            if part and longest * (len(part) + 1) * len(example.texts) > self._options.microbatch_tokens:
                yield part
                part = []
            part.append(example)
        if part:
            yield part

    def _batch(self, examples: Sequence[Example]) -> tuple[mx.array, mx.array, mx.array]:
        ids_BL, last_B = padded([text.ids for example in examples for text in example.texts])
        return ids_BL, last_B, mx.array([example.target for example in examples])

    def _loss(self, ids_BL: mx.array, last_B: mx.array, targets_N: mx.array, count: int) -> mx.array:
        """The part of `count` examples' mean loss."""
        outputs_BO = self._net(ids_BL, last_B)
        if self._form == "pairs":
            chosen_N, rejected_N = outputs_BO[0::2, 0], outputs_BO[1::2, 0]
            return mx.sum(nn.softplus(rejected_N - chosen_N)) / count
        if self._form == "scores":
            return mx.sum(mx.square(outputs_BO[:, 0] - targets_N)) / count
        return mx.sum(nn.losses.cross_entropy(outputs_BO, targets_N.astype(mx.int32))) / count


def share_right(form: Form, outputs_BO: Outputs, targets: Sequence[float]) -> float:
    """How much of it is right; of scores, among all two that differ, 0.5 where none do."""
    if form == "pairs":
        return float(np.mean(outputs_BO[0::2, 0] > outputs_BO[1::2, 0]))
    if form == "labels":
        return float(np.mean(np.argmax(outputs_BO, axis=-1) == np.array(targets)))
    below: list[float] = []  # what was said of all that are wanted lower, sorted
    right = pairs = 0
    for _, level in groupby(sorted(zip(targets, outputs_BO[:, 0].tolist(), strict=True)), key=itemgetter(0)):
        said = [each for _, each in level]
        right += sum(bisect_left(below, each) for each in said)
        pairs += len(below) * len(said)
        for each in said:
            insort(below, each)
    return right / pairs if pairs else 0.5
