"""One train step of a head, and what it gets right. Belongs to the MLX thread; plain data goes in and out."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from shared.adapter_files.config import mlx_config
from shared.errors import SetupError
from shared.heads import HeadKind, HeadSpec
from trainer.datasets.learner import DataLearner, DataOptions, Measured, Size, policy_of
from trainer.heads.examples import Example, Form, Text
from trainer.heads.network import Net, arrays_of, load_arrays, padded
from trainer.learn.compute import Work
from trainer.learn.head_net import HeadNet
from trainer.learn.logprobs import cut
from trainer.learn.options import HeadSettings
from trainer.learn.policy import share_tree
from trainer.state import Arrays

Outputs = npt.NDArray[np.float32]


class HeadLearner(DataLearner[Example]):
    """Head and LoRA."""

    def __init__(
        self,
        model: Any,
        form: Form,
        labels: Sequence[str],
        start: float,
        head: HeadSettings,
        options: DataOptions,
    ) -> None:
        self._form, self._name = form, head.head
        self._policy = None if options.shape is None else policy_of(model, options.shape, options)
        body = share_tree(model) if self._policy is None else self._policy.model
        if self._policy is None:
            body.freeze()
            body.eval()
        halves = cut(body)
        if halves is None:
            raise SetupError("this model shows no hidden states, so no head can read them")
        inputs = int(halves.body(mx.zeros((1, 1), mx.int32)).shape[-1])
        hidden = head.head_hidden
        kind: HeadKind = "labels" if form == "labels" else "scalar"
        try:
            self.spec = HeadSpec(kind, tuple(labels), "gelu" if hidden else "", inputs=inputs, hidden=hidden)
        except ValueError as error:
            raise SetupError(f"bad settings: {error}") from error
        self._head = HeadNet(self.spec, start=start, seed=options.seed)
        self._net = Net(body, self._head, halves.body)
        self._of_net = nn.value_and_grad(self._net, self._loss)
        learns = {"head": self._head} if self._policy is None else {"head": self._head, "body": body}
        super().__init__(options, learns, {"head": head.head_learning_rate / options.schedule.peak})

    # -- learning

    def measure(self, items: Sequence[Example]) -> Work[Measured]:
        """Of pairs, the share that is ranked as people did; of scores, of two at a time; of labels, the share named."""
        said: list[Outputs] = []
        for part in self._parts(items):
            ids_BL, last_B, _ = self._batch(part)
            said.append(np.array(self._net(ids_BL, last_B)))
            yield
        return Measured(share_right(self._form, np.concatenate(said), [example.target for example in items]))

    def read(self, texts: Sequence[Text]) -> Work[list[list[float]]]:
        """What the head says of each text."""
        said: list[list[float]] = []
        for text in texts:
            said.append(np.array(self._net(*padded([text.ids])))[0].tolist())
            yield
        return said

    # -- weights

    def weights(self) -> Arrays:
        """See `DataLearner`."""
        own = self._policy.weights() if self._policy is not None else {}
        return own | arrays_of(self._head, self._name)

    def config(self) -> bytes:
        """See `DataLearner`."""
        shape, heads = self._options.shape, {self._name: self.spec}
        if shape is None or self._policy is None:
            return mlx_config("head", 0, 0.0, (), heads)
        return mlx_config(shape.kind, shape.rank, shape.scale, tuple(self._policy.modules), heads)

    def _load(self, weights: Arrays) -> None:
        if self._policy is not None:
            self._policy.load({name: value for name, value in weights.items() if not name.startswith("heads.")})
        load_arrays(self._head, self._name, weights)

    # -- batches

    def _size(self, item: Example) -> Size:
        return Size(len(item.texts), max(len(text.ids) for text in item.texts))

    def _tokens(self, items: Sequence[Example]) -> int:
        return 0

    def _gradient(self, part: Sequence[Example], items: Sequence[Example]) -> tuple[Any, dict[str, Any]]:
        value, gradients = self._of_net(*self._batch(part), len(items))
        return value, gradients

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
