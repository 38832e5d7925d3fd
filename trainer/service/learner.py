"""One learner in the MLX thread: an adapter over the shared base, its AdamW, and the gradients that wait for a step.

Invariants.
- The base's arrays are shared with every other learner; its own are the adapter, two moments and the gradients.
- A pass changes gradients only when all of it has been computed and is finite; a step changes weights, moments and
  gradients together. So an error of either leaves a learner as it was.
- Gradients that lack a part (a pass that was to bring it has failed) are never applied: `spoil` drops them, and the
  next step is refused.
- The state is a function of the requests alone; nothing is drawn but the first weights, from the seed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from safetensors.numpy import load as read_safetensors
from safetensors.numpy import save as write_safetensors

from shared.errors import ConflictError, InvalidRequestError, UnsupportedModelError
from shared.images.refs import Picture
from shared.learners import Datum, LearnerSpec, LossName, PassDone, PassRequest, StepDone, StepRequest, Values
from trainer.learn.adam import AdamSteps, StepSizes, added, all_finite
from trainer.learn.compute import Work
from trainer.learn.logprobs import halves_of, head_chunk
from trainer.learn.options import AdapterShape
from trainer.learn.picture_places import Shown, looking, shown_in_rows
from trainer.learn.policy import Policy, share_tree
from trainer.rollouts.sight import Sight
from trainer.service.losses import elementwise
from trainer.state import Arrays

WIDTH = 8  # rows are padded to a multiple of it, so that few shapes occur
MOST_TARGETS = 64  # a position of a microbatch, on average: rows are padded to the most of one of them, too
_SPOILED = "spoiled"  # a name in a state
Floats = npt.NDArray[np.float32]
_NO_PICTURES: Mapping[bytes, Picture] = MappingProxyType({})


class ServiceLearner:
    """Belongs to the thread that built it; ValueError when the model has no layers for the adapter."""

    def __init__(
        self, model: Any, spec: LearnerSpec, microbatch_tokens: int = 8192, sight: Sight | None = None
    ) -> None:
        targets = _targets(share_tree(model), attention=spec.attention, mlp=spec.mlp)
        shape = AdapterShape(spec.kind, spec.rank, spec.scale, targets)
        self.policy = Policy(model, shape, seed=spec.seed)
        self._microbatch_tokens = microbatch_tokens
        self._sight = sight
        self.chunk = head_chunk(self.policy.base)
        self.waiting: Any = None  # gradients, as a tree like the trainable parameters
        self._spoiled = ""  # why a part of them is missing
        self._adam = AdamSteps(self.policy.model)

    # -- learning

    def run(self, request: PassRequest, pictures: Mapping[bytes, Picture] = _NO_PICTURES) -> Work[PassDone]:
        """A forward, with gradients if they are asked for; yields after every microbatch and every image.

        `pictures`: of its images, by key. InvalidRequestError when the loss or a gradient is not finite.
        """
        outputs: list[dict[str, Values]] = [{} for _ in request.data]
        total, gradients = 0.0, None
        for part in _parts(request.data, self._microbatch_tokens):
            data = [request.data[i] for i in part]
            ids_BL, inputs, seen = _padded(data)
            shown = yield from self._shown(ids_BL, data, pictures)
            asked = (mx.array(ids_BL), inputs, seen, request.loss, request.constants, shown)
            if request.backward:
                gradient = nn.value_and_grad(self.policy.model, self._loss)  # not kept: it holds this learner
                (value, logp, each), more = gradient(self.policy.model, *asked)
                gradients = added(gradients, more)
                mx.eval(value, logp, each, gradients)
            else:
                value, logp, each = self._loss(self.policy.model, *asked)
                mx.eval(value, logp, each)
            total += float(value.item())
            for row, i in enumerate(part):
                outputs[i] = _output(request.loss, request.data[i], logp[row], each[row])
            yield
        if not math.isfinite(total) or not all_finite(gradients):
            raise InvalidRequestError("the loss or its gradient is not a finite number")
        if request.backward:
            self.waiting = added(self.waiting, gradients)
            mx.eval(self.waiting)
        return PassDone(tuple(outputs), {"loss:sum": total})

    def step(self, request: StepRequest) -> StepDone:
        """One update; ConflictError without gradients or with a part of them only, which are then dropped."""
        spoiled, self._spoiled = self._spoiled, ""
        if spoiled:
            self.waiting = None
            raise ConflictError(f"no step: a pass since the last one has failed ({spoiled})")
        if self.waiting is None:
            raise ConflictError("no step: there has been no backward pass since the last one")
        gradient, self.waiting = self.waiting, None
        betas = (request.beta1, request.beta2)
        sizes = StepSizes(request.learning_rate, betas, request.weight_decay, request.eps, request.max_grad_norm)
        norm, updated = self._adam.update(gradient, sizes)
        if not updated:
            raise InvalidRequestError("the gradient, or what it would make, is not finite; it has been dropped")
        metrics = {
            "unclipped_grad_l2:mean": norm,
            "step:max": float(self.steps),
            "learning_rate:mean": request.learning_rate,
        }
        return StepDone(metrics)

    def spoil(self, reason: str) -> None:
        """A backward pass has failed: what others have added must not be applied without it. "": a step has."""
        self.waiting, self._spoiled = None, reason

    # -- state

    @property
    def steps(self) -> int:
        """Updates that the optimizer has made."""
        return self._adam.count

    def weights(self) -> Arrays:
        """The adapter as plain data."""
        return self.policy.weights()

    def config(self) -> bytes:
        return self.policy.config()

    def state(self) -> bytes:
        """Weights, moments and waiting gradients as a safetensors file."""
        parts: dict[str, Any] = {"weights": self.weights(), "adam": self._adam.moments()}
        if self.waiting is not None:
            parts["waiting"] = dict(tree_flatten(self.waiting))
        arrays = {f"{part}/{name}": np.array(value) for part, values in parts.items() for name, value in values.items()}
        arrays[_SPOILED] = np.frombuffer(self._spoiled.encode(), np.uint8)
        return write_safetensors(arrays)

    def weights_alone(self) -> bytes:
        """The part of a state that is the adapter."""
        return write_safetensors({f"weights/{name}": value for name, value in self.weights().items()})

    def restore(self, state: bytes) -> None:
        """Go on exactly where `state` was taken."""
        self.load(state)
        arrays = read_safetensors(state)
        waiting = _part(arrays, "waiting")
        if waiting:
            self.waiting = self._adam.ordered(waiting)
        self._spoiled = arrays[_SPOILED].tobytes().decode()

    def load(self, state: bytes, *, optimizer: bool = True) -> None:
        """Go on from a save's weights, with its moments or new ones; ConflictError when it is of another shape."""
        arrays = read_safetensors(state)
        try:
            self.policy.load(_part(arrays, "weights"))
        except ValueError as error:
            raise ConflictError(f"the save is of another shape: {error}") from error
        self._adam.reset()
        self.waiting, self._spoiled = None, ""
        if optimizer:
            self._adam.load_moments(_part(arrays, "adam"))

    # -- computing

    def _shown(
        self, ids_BL: npt.NDArray[np.int32], data: Sequence[Datum], pictures: Mapping[bytes, Picture]
    ) -> Work[Shown | None]:
        """The images of some rows; EngineError when what is seen is not what the rows have places for."""
        if not any(datum.images for datum in data):
            return None
        if self._sight is None:
            raise UnsupportedModelError("this service does not learn from images", param="data")
        images_B = yield from self._sight.rows([datum.images for datum in data], pictures)
        return shown_in_rows(ids_BL, images_B, self._sight.vision.image_token_id)

    def _loss(
        self,
        model: Any,
        tokens_BL: mx.array,
        inputs: dict[str, mx.array],
        seen: mx.array,
        loss: LossName,
        constants: dict[str, float],
        shown: Shown | None,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """The sum, the log-probability of each target and the loss of each."""
        body, head = halves_of(model, self.chunk)
        with looking(model, tokens_BL, shown, shown and shown.rows) as images:
            hidden_BLH = body(tokens_BL, **images)
        logp = _logps(head, hidden_BLH, inputs["target_tokens"], self.chunk)
        each = elementwise(loss, logp, inputs, constants, seen)
        return each.sum(), logp, each


def _logps(head: Any, hidden_BLH: mx.array, targets_BLK: mx.array, chunk: int) -> mx.array:
    """Log-probability [B, L, K] of each target, fp32; the head takes `chunk` positions at a time, 0: all at once."""
    hidden_NH = hidden_BLH.reshape(-1, hidden_BLH.shape[-1])
    targets_NK = targets_BLK.reshape(-1, targets_BLK.shape[-1])
    count = len(targets_NK)
    step = min(chunk or count, count)

    def scores_from(at: int) -> mx.array:
        def scores(part_NH: mx.array) -> mx.array:
            logits_NV = head(part_NH[None])[0].astype(mx.float32)
            said = mx.take_along_axis(logits_NV, targets_NK[at : at + step], axis=-1)
            return said - mx.logsumexp(logits_NV, axis=-1, keepdims=True)

        part: mx.array = (mx.checkpoint(scores) if step < count else scores)(hidden_NH[at : at + step])
        return part

    return mx.concatenate([scores_from(at) for at in range(0, count, step)]).reshape(targets_BLK.shape)


def _parts(data: Sequence[Datum], most: int) -> Iterator[list[int]]:
    """Indices of data that go together, by length and then by place, at most so many padded positions at once."""
    lengths = [len(datum.tokens) // 4 for datum in data]
    order = sorted(range(len(data)), key=lambda i: (-lengths[i], i))
    part: list[int] = []
    widest = 0  # of the part: targets of a position
    for i in order:
        widest = max(widest, _targets_each(data[i]))
        positions = (len(part) + 1) * _width(lengths[part[0] if part else i])
        if part and (positions > most or positions * widest > most * MOST_TARGETS):
            yield part
            part, widest = [], _targets_each(data[i])
        part.append(i)
    if part:
        yield part


def _targets_each(datum: Datum) -> int:
    shape = datum.inputs["target_tokens"].shape
    return shape[1] if len(shape) == 2 else 1


def _width(length: int) -> int:
    return -(-length // WIDTH) * WIDTH


def _padded(data: Sequence[Datum]) -> tuple[npt.NDArray[np.int32], dict[str, mx.array], mx.array]:
    """Tokens [B, L], inputs [B, L, K] and what of them is seen [B, L, K]; rows are padded on the right."""
    width = _width(max(len(datum.tokens) // 4 for datum in data))
    most = max(_targets_each(datum) for datum in data)
    tokens_BL = np.zeros((len(data), width), np.int32)
    seen = np.zeros((len(data), width, most), bool)
    inputs = {
        name: np.zeros(seen.shape, np.int32 if name == "target_tokens" else np.float32) for name in data[0].inputs
    }
    for row, datum in enumerate(data):
        ids = datum.ids()
        tokens_BL[row, : len(ids)] = ids
        for name, values in datum.inputs.items():
            array = values.array().reshape(len(ids), -1)
            inputs[name][row, : len(ids), : array.shape[1]] = array
            seen[row, : len(ids), : array.shape[1]] = True
    return tokens_BL, {name: mx.array(value) for name, value in inputs.items()}, mx.array(seen)


def _output(loss: LossName, datum: Datum, logp: mx.array, each: mx.array) -> dict[str, Values]:
    shape = datum.inputs["target_tokens"].shape

    def cut(values: mx.array) -> Values:
        array: Floats = np.array(values)[: shape[0], : shape[1] if len(shape) == 2 else 1]
        return Values.of(array.reshape(shape))

    said = {"logprobs": cut(logp)}
    return said | {"elementwise_loss": cut(each)} if loss == "cross_entropy" else said


def _part(arrays: dict[str, npt.NDArray[Any]], part: str) -> Arrays:
    return {name.split("/", 1)[1]: value for name, value in arrays.items() if name.startswith(f"{part}/")}


def _targets(model: Any, *, attention: bool, mlp: bool) -> tuple[str, ...]:
    """Paths of the linear layers that get an adapter; () is all of a layer's."""
    if attention and mlp:
        return ()
    paths = [path for path, _ in model.named_modules() if "layers." in path]
    wanted = [path for path in paths if ("attn" in path or "attention" in path) == attention]
    if not wanted or not (attention or mlp):
        raise ValueError("an adapter needs attention layers, others, or both")
    return tuple(wanted)
