"""One train step of a head, and what it gets right. Belongs to the MLX thread; plain data goes in and out.

A head that acts learns by the log-probability of the actions that were taken, each by its weight: to do as was done, or
with weights exp(advantage / beta) to do what turned out well (advantage-weighted regression, arXiv 1910.00177). A
gaussian head learns in deviations from the mean of all actions, whatever their unit is; its weights are those of the
unit. What it is shown is blurred by `BLUR` deviations, so that no spread is worth going to zero.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map

from mlx_model.sites import Whole
from shared.adapter_files.config import mlx_config
from shared.errors import SetupError
from shared.heads import POLICY, REWARD, HeadKind, HeadSpec
from trainer.learn.compute import Work
from trainer.learn.head_net import HeadNet
from trainer.learn.logprobs import cut
from trainer.learn.options import HeadSettings
from trainer.learn.policy import share_tree
from trainer.learners.calls import exposed
from trainer.learners.data import DataLearner, DataOptions, ItemSize, Measured, policy_of
from trainer.learners.head_examples import ACTING, ActionSpread, Form, HeadExample, HeadText
from trainer.state import Arrays

Outputs = npt.NDArray[np.float32]

BLUR = 0.01
_KINDS: dict[Form, HeadKind] = {"labels": "labels", "actions": "categorical", "vectors": "gaussian"}  # else scalar
_LOG_2PI = math.log(2 * math.pi)


class HeadLearner(DataLearner[HeadExample]):
    """Trains a head, and the LoRA below it."""

    def __init__(
        self,
        model: Any,
        form: Form,
        labels: Sequence[str],
        start: float | ActionSpread,
        head: HeadSettings,
        options: DataOptions,
        whole: Whole | None = None,
    ) -> None:
        """`start`: the head's first outputs; `whole`: the model before ranks divided it."""
        self._ranks = None if whole is None else whole.ranks
        self._form, self.name = form, head.head or (POLICY if form in ACTING else REWARD)
        self._spread = start if isinstance(start, ActionSpread) else None
        self._policy = None if options.shape is None else policy_of(model, options.shape, options, whole=whole)
        body = share_tree(model) if self._policy is None else self._policy.model
        if self._policy is None:
            body.freeze()
            body.eval()
        halves = cut(body)
        if halves is None:
            raise SetupError("this model shows no hidden states, so no head can read them")
        inputs = int(halves.body(mx.zeros((1, 1), mx.int32)).shape[-1])
        hidden = head.head_hidden
        kind, size = _KINDS.get(form, "scalar"), 0 if self._spread is None else len(self._spread.means)
        try:
            self.spec = HeadSpec(kind, tuple(labels), "gelu" if hidden else "", inputs=inputs, hidden=hidden, size=size)
        except ValueError as error:
            raise SetupError(f"bad settings: {error}") from error
        self._head = HeadNet(self.spec, start=start if isinstance(start, float) else 0.0, seed=options.seed)
        self._net = Net(body, self._head, halves.body)
        self._of_net = nn.value_and_grad(self._net, self._loss)
        learns = {"head": self._head} if self._policy is None else {"head": self._head, "body": body}
        super().__init__(options, learns, {"head": head.head_learning_rate / options.schedule.peak})

    # -- learning

    def measure(self, items: Sequence[HeadExample]) -> Work[Measured]:
        """Share of pairs that are ranked as in the data; of scores, share of two at a time; of labels, share that is
        predicted.

        Of actions, by their weights, the share that is likeliest, or of the vectors' variance what the means explain.
        """
        said: list[Outputs] = []
        losses: list[Outputs] = []
        for part in self._parts(items):
            ids_BL, last_B, targets, _ = self._batch(part)
            outputs_BO = self._net(ids_BL, last_B)
            said.append(np.array(outputs_BO))
            losses.append(np.array(self._losses(outputs_BO, targets)))
            yield
        return self._measured(items, np.concatenate(said), np.concatenate(losses))

    def _measured(self, items: Sequence[HeadExample], said_BO: Outputs, losses_N: Outputs) -> Measured:
        wanted = [example.target for example in items]
        if self._form not in ACTING:
            return Measured(share_right(self._form, said_BO, wanted))
        if self._form == "actions":
            right_N = np.argmax(said_BO, axis=-1) == np.array(wanted)
        else:
            right_N = 1.0 - np.mean(np.square(self._targets(items) - said_BO[:, : self.spec.size]), axis=-1)
        weights_N = np.array([example.weight for example in items])
        right, loss = (float(np.average(each, weights=weights_N)) for each in (right_N, losses_N))
        return Measured(max(0.0, right), loss)

    @exposed
    def read(self, texts: Sequence[HeadText]) -> Work[list[list[float]]]:
        """Outputs of the head for each text."""
        said: list[list[float]] = []
        for text in texts:
            outputs_O = np.array(self._net(*padded([text.ids])))[0]
            said.append(
                (outputs_O if self._spread is None else self._spread.scale * outputs_O + self._spread.shift).tolist()
            )
            yield
        return said

    def in_deviations(self, outputs: Sequence[float]) -> list[float]:
        """Outputs of a gaussian head in units of the actions' standard deviations."""
        assert self._spread is not None
        said: list[float] = ((np.array(outputs) - self._spread.shift) / self._spread.scale).tolist()
        return said

    # -- weights

    def weights(self) -> Arrays:
        own = self._policy.weights() if self._policy is not None else {}
        return own | scaled(arrays_of(self._head, self.name), self.name, self._spread)

    def config(self) -> bytes:
        shape, heads = self._options.shape, {self.name: self.spec}
        if shape is None or self._policy is None:
            return mlx_config("head", 0, 0.0, (), heads)
        return mlx_config(shape.kind, shape.rank, shape.scale, tuple(self._policy.modules), heads)

    def _load(self, weights: Arrays) -> None:
        if self._policy is not None:
            self._policy.load({name: value for name, value in weights.items() if not name.startswith("heads.")})
        load_arrays(self._head, self.name, scaled(weights, self.name, self._spread, back=True))

    def digest(self) -> int:
        """A sum over the bits of all parameters, by which ranks see that they have the same ones."""
        own = sum(int(np.array(value.view(mx.uint32).sum())) for _, value in tree_flatten(self._head.parameters()))
        return own if self._policy is None else own + self._policy.digest()

    def _whole(self, gradients: dict[str, Any]) -> dict[str, Any]:
        if self._policy is None:
            return gradients
        return gradients | {"body": self._policy.whole(gradients["body"])}

    def _agree(self) -> None:
        if self._ranks is None:
            return
        if self._policy is not None:
            self._policy.agree()
        self._head.update(tree_map(self._ranks.same, self._head.parameters()))
        mx.eval(self._head.parameters())

    # -- batches

    def _size(self, item: HeadExample) -> ItemSize:
        return ItemSize(len(item.texts), max(len(text.ids) for text in item.texts))

    def _tokens(self, items: Sequence[HeadExample]) -> int:
        return 0

    def _gradient(self, part: Sequence[HeadExample], items: Sequence[HeadExample]) -> tuple[Any, dict[str, Any]]:
        value, gradients = self._of_net(*self._batch(part), len(items))
        return value, gradients

    def _batch(self, examples: Sequence[HeadExample]) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        ids_BL, last_B = padded([text.ids for example in examples for text in example.texts])
        return ids_BL, last_B, mx.array(self._targets(examples)), mx.array([example.weight for example in examples])

    def _targets(self, examples: Sequence[HeadExample]) -> Outputs:
        """[N], or of vectors [N, A] in deviations."""
        if self._spread is None:
            return np.array([example.target for example in examples], np.float32)
        actions_NA = np.array([example.action for example in examples])
        return np.asarray((actions_NA - self._spread.means) / self._spread.stds, np.float32)

    def _loss(self, ids_BL: mx.array, last_B: mx.array, targets: mx.array, weights_N: mx.array, count: int) -> mx.array:
        """The part of `count` examples' mean loss."""
        return mx.sum(weights_N * self._losses(self._net(ids_BL, last_B), targets)) / count

    def _losses(self, outputs_BO: mx.array, targets: mx.array) -> mx.array:
        """Loss [N] of each example; `targets` has shape [N], for vectors [N, A]."""
        losses_N: mx.array
        if self._form == "pairs":
            losses_N = nn.softplus(outputs_BO[1::2, 0] - outputs_BO[0::2, 0])
        elif self._form == "scores":
            losses_N = mx.square(outputs_BO[:, 0] - targets)
        elif self._form == "vectors":
            mean_NA, log_std_NA = outputs_BO[:, : self.spec.size], outputs_BO[:, self.spec.size :]
            errors_NA = mx.square(targets - mean_NA) + BLUR**2
            losses_NA = 0.5 * errors_NA * mx.exp(-2 * log_std_NA) + log_std_NA + 0.5 * _LOG_2PI
            losses_N = mx.sum(losses_NA, axis=-1)
        else:
            losses_N = nn.losses.cross_entropy(outputs_BO, targets.astype(mx.int32))
        return losses_N


def share_right(form: Form, outputs_BO: Outputs, targets: Sequence[float]) -> float:
    """Share of right predictions; for scores, among all pairs that differ, 0.5 where none do."""
    if form == "pairs":
        return float(np.mean(outputs_BO[0::2, 0] > outputs_BO[1::2, 0]))
    if form == "labels":
        return float(np.mean(np.argmax(outputs_BO, axis=-1) == np.array(targets)))
    below: list[float] = []  # outputs for all items of lower targets, sorted
    right = pairs = 0
    for _, level in groupby(sorted(zip(targets, outputs_BO[:, 0].tolist(), strict=True)), key=itemgetter(0)):
        said = [each for _, each in level]
        right += sum(bisect_left(below, each) for each in said)
        pairs += len(below) * len(said)
        for each in said:
            insort(below, each)
    return right / pairs if pairs else 0.5


class Net(nn.Module):  # type: ignore[misc]
    """Body and head in one tree, so that both have gradients; `states` makes hidden states [B, L, H] of ids."""

    def __init__(self, body: Any, head: HeadNet, states: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self.body = body
        self.head = head
        self._states = states

    def __call__(self, ids_BL: mx.array, last_B: mx.array) -> mx.array:
        """Outputs [B, O] of the head at the last token of each row; rows are padded on the right."""
        states_BLH = self._states(ids_BL)
        states_BH = states_BLH[mx.arange(ids_BL.shape[0]), last_B]
        outputs_BO: mx.array = self.head(states_BH.astype(mx.float32))
        return outputs_BO


def padded(rows: Sequence[Sequence[int]]) -> tuple[mx.array, mx.array]:
    """Ids [B, L], padded on the right to few different widths, and the index of each row's last one."""
    longest = max(map(len, rows))
    width = -(-longest // 16) * 16
    ids = np.zeros((len(rows), width), np.int32)
    for row, each in zip(ids, rows, strict=True):
        row[: len(each)] = each
    return mx.array(ids), mx.array([len(each) - 1 for each in rows])


def arrays_of(head: HeadNet, name: str) -> Arrays:
    """Arrays of a head under the names that they have in an adapter's file."""
    parts = {f"heads.{name}.weight": head.weight, f"heads.{name}.bias": head.bias}
    if "hidden" in head:
        parts |= {f"heads.{name}.hidden.weight": head.hidden.weight, f"heads.{name}.hidden.bias": head.hidden.bias}
    return {key: np.array(value) for key, value in parts.items()}


def load_arrays(head: HeadNet, name: str, arrays: Arrays) -> None:
    """Replace the head's arrays by those of an adapter's file."""
    layers = {"": head, "hidden.": head.hidden} if "hidden" in head else {"": head}
    for place, layer in layers.items():
        layer.weight, layer.bias = (mx.array(arrays[f"heads.{name}.{place}{part}"]) for part in ("weight", "bias"))


def scaled(arrays: Arrays, name: str, spread: ActionSpread | None, *, back: bool = False) -> Arrays:
    """A head's tensors for outputs in the unit of actions, or `back` for those in deviations."""
    if spread is None:
        return arrays
    weight, bias = (f"heads.{name}.{part}" for part in ("weight", "bias"))
    scale, shift = spread.scale, spread.shift
    if back:
        return arrays | {weight: arrays[weight] / scale[:, None], bias: (arrays[bias] - shift) / scale}
    return arrays | {weight: arrays[weight] * scale[:, None], bias: arrays[bias] * scale + shift}
