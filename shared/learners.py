"""Requests to a learner of the training service, and its answers: plain messages.

**learner** an adapter that is trained over a shared base, with an optimizer of its own · **pass** a forward over some
data, with or without gradients, which add up until the next step · **step** one AdamW update with them · **save** a
named copy of a learner's state. A learner's requests are numbered 1, 2, ... by who asks, and are carried out in this
order.

The shapes of what goes in and out are those of Tinker's protocol: position i of a datum's tokens [L] predicts the
target i, or the K targets i of shape [L, K].
"""

import math
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from shared.adapters import LoraKind
from shared.errors import InvalidRequestError
from shared.images.refs import ImageRef
from shared.machine.status import MachineStatus

LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]
ValueType = Literal["float32", "int64"]
SaveKind = Literal["state", "sampler", "external"]
Fault = Literal["user", "server"]

INPUTS: dict[LossName, tuple[str, ...]] = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": ("target_tokens", "logprobs", "advantages"),
    "ppo": ("target_tokens", "logprobs", "advantages"),
    "cispo": ("target_tokens", "logprobs", "advantages"),
    "dro": ("target_tokens", "logprobs", "advantages"),
}
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
CONSTANTS: dict[LossName, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": _CLIP,
    "cispo": _CLIP,
    "dro": {"beta": 0.05},
}


class LearnerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Definition of a learner, fixed when it is created."""

    id: str
    model: str  # served name of the base
    rank: int
    scale: float  # the factor on B A x: alpha / rank
    kind: LoraKind = "lora"
    seed: int = 0
    attention: bool = True  # whether its linear layers get an adapter
    mlp: bool = True  # and those of the rest of a layer
    owner: str = ""  # whose its adapter is (shared/owners.py)
    keeper: str = ""  # digest of the tenant's or API key's name whose the learner is
    adapter: str = ""  # name under which its weights are published for sampling
    created_ms: int = 0  # Unix milliseconds
    metadata: dict[str, str] = {}
    run: bytes = b""  # of a run of mlx_parallm_train: what its learner is made with, msgpack


class Values(msgspec.Struct, frozen=True, array_like=True):
    """A dense array as bytes, little-endian, row by row."""

    dtype: ValueType
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: npt.NDArray[np.float32] | npt.NDArray[np.int64]) -> "Values":
        """As bytes: floats as float32, all else as int64."""
        dtype: ValueType = "float32" if array.dtype.kind == "f" else "int64"
        return cls(dtype, tuple(array.shape), np.ascontiguousarray(array, np.dtype(dtype).newbyteorder("<")).tobytes())

    def array(self) -> npt.NDArray[np.float32] | npt.NDArray[np.int64]:
        """The array; ValueError when its bytes are not of its shape."""
        flat: npt.NDArray[np.float32] = np.frombuffer(self.data, np.dtype(self.dtype).newbyteorder("<"))
        return flat.reshape(self.shape)


class Datum(msgspec.Struct, frozen=True, array_like=True):
    """One sequence with what its loss needs: `inputs` [L] or [L, K] by name (INPUTS)."""

    tokens: bytes  # [L] int32, little-endian
    inputs: dict[str, Values]
    images: tuple[ImageRef, ...] = ()  # in order; as many tokens are the model's placeholder as they have vectors

    def ids(self) -> npt.NDArray[np.int32]:
        """Token ids as int32, shape [L]."""
        return np.frombuffer(self.tokens, "<i4")


class BeginRequest(msgspec.Struct, frozen=True, tag="begin"):
    """No operation; its answer confirms that a service has the learner, and that the model has layers for it."""


class PassRequest(msgspec.Struct, frozen=True, tag="pass"):
    """A forward over the data; with `backward` its gradients are added to the ones for the next step."""

    data: tuple[Datum, ...]
    loss: LossName
    constants: dict[str, float] = {}
    backward: bool = True
    files: dict[bytes, bytes] = {}  # of the images, by SHA-256


class ImagePassRequest(PassRequest, frozen=True, tag="seen_pass"):
    """One with images. A service from before images cannot read it, so that none learns from their placeholders."""


class StepRequest(msgspec.Struct, frozen=True, tag="step"):
    """One AdamW update (Loshchilov, Hutter, arXiv 1711.05101) with the gradients that wait, which are then gone."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0  # 0: gradients are not clipped


class SaveRequest(msgspec.Struct, frozen=True, tag="save"):
    """Save the state under a name, for `ttl_s` (0: the service's time to live of saves).

    Of kind `external` the weights alone, which nobody goes on from.
    """

    name: str
    ttl_s: int = 0
    metadata: dict[str, str] = {}
    kind: Literal["state", "external"] = "state"


class LoadRequest(msgspec.Struct, frozen=True, tag="load"):
    """Go on from a save, of this learner or one of the same shape; without `optimizer` with moments of 0."""

    learner: str
    name: str
    optimizer: bool = True


class PublishRequest(msgspec.Struct, frozen=True, tag="publish"):
    """Make the present weights the next version of the learner's adapter, so that workers sample from it.

    With `ttl_s` 0 it is no save: nothing keeps the version once newer ones have come.
    """

    name: str
    ttl_s: int = 0
    metadata: dict[str, str] = {}


class CallRequest(msgspec.Struct, frozen=True, tag="ask"):
    """A call of a learner's method by a run of `mlx_parallm_train`: a `Call` (trainer/learners/calls.py) as msgpack."""

    body: bytes = b""
    upload: str = ""  # where it lies in chunks, in place of `body`


class RefusedRequest(msgspec.Struct, frozen=True, tag="refused"):
    """One that an api has refused, in its place; its answer is that error, and its effect that of a failed one."""

    message: str
    of: Literal["pass", "step", "other"] = "other"  # a pass with gradients, an update


Request = (
    BeginRequest
    | PassRequest
    | ImagePassRequest
    | StepRequest
    | SaveRequest
    | LoadRequest
    | PublishRequest
    | CallRequest
    | RefusedRequest
)


class BeginDone(msgspec.Struct, frozen=True, tag="begin"):
    """The service has the learner, and the model has layers for it."""


class PassDone(msgspec.Struct, frozen=True, tag="pass"):
    """For each datum the `logprobs` of its targets and, of cross_entropy, the `elementwise_loss`; `metrics` are sums
    over all data.
    """

    outputs: tuple[dict[str, Values], ...]
    metrics: dict[str, float]


class StepDone(msgspec.Struct, frozen=True, tag="step"):
    """`metrics`: the norm of the gradients before clipping, the number of the step, the learning rate."""

    metrics: dict[str, float]


class SaveDone(msgspec.Struct, frozen=True, tag="save"):
    """A save or a version is there."""

    name: str
    kind: SaveKind
    version: int = 0  # of the learner's adapter; 0 for a save


class LoadDone(msgspec.Struct, frozen=True, tag="load"):
    """The learner goes on from there."""

    step: int  # updates that its optimizer has made


class CallDone(msgspec.Struct, frozen=True, tag="told"):
    """Result of a `CallRequest`, as msgpack."""

    body: bytes = b""
    name: str = ""  # of a save that holds it, in place of `body`


class RequestFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Nothing was changed by this request, except that gradients which lack a part of theirs are dropped."""

    message: str
    fault: Fault = "user"


Answer = BeginDone | PassDone | StepDone | SaveDone | LoadDone | CallDone | RequestFailed


class SaveInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a save or of a published version."""

    name: str
    kind: SaveKind
    created_ms: int
    expires_ms: int
    size: int = 0  # bytes
    bytes_id: str = ""  # of a save: where its chunks lie
    version: int = 0  # of a published version
    step: int = 0
    metadata: dict[str, str] = {}


class ServiceCard(msgspec.Struct, frozen=True, kw_only=True):
    """Heartbeat of a service that trains learners of a model."""

    id: str
    model: str
    max_rank: int
    max_learners: int
    learners: int = 0  # in its memory
    sees: bool = False  # learns from images, too
    machine: MachineStatus = MachineStatus()  # its memory; of a service inside a worker, the worker's


def checked(request: PassRequest, vocabulary: int, context: int) -> None:
    """InvalidRequestError when a pass's data does not fit its loss, the model's vocabulary or its context."""
    if request.loss not in INPUTS:
        raise InvalidRequestError(f"no loss {request.loss!r}: {', '.join(INPUTS)}", param="loss_fn")
    unknown = sorted(set(request.constants) - set(CONSTANTS[request.loss]))
    if unknown:
        raise InvalidRequestError(f"loss {request.loss!r} has no constant {unknown[0]!r}", param="loss_fn_config")
    if not all(math.isfinite(value) for value in request.constants.values()):
        raise InvalidRequestError("the constants of a loss are finite numbers", param="loss_fn_config")
    if not request.data:
        raise InvalidRequestError("no data", param="data")
    for index, datum in enumerate(request.data):
        try:
            _check(datum, request.loss, vocabulary, context)
        except ValueError as error:
            raise InvalidRequestError(f"invalid 'data[{index}]': {error}", param=f"data[{index}]") from error


def _check(datum: Datum, loss: LossName, vocabulary: int, context: int) -> None:
    if not datum.tokens or len(datum.tokens) % 4:
        raise ValueError("it has no tokens")
    ids = datum.ids()
    if len(ids) > context:
        raise ValueError(f"{len(ids)} tokens, the model's context is {context}")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"a token id outside 0 to {vocabulary - 1}")
    wanted = INPUTS[loss]
    if set(datum.inputs) != set(wanted):
        raise ValueError(f"its inputs are {sorted(datum.inputs)}, of {loss} they are {sorted(wanted)}")
    targets = datum.inputs["target_tokens"]
    if targets.dtype != "int64":
        raise ValueError("target_tokens are int64")
    shape = targets.shape
    several = loss == "cross_entropy" and len(shape) == 2 and shape[1] > 0
    if shape[:1] != (len(ids),) or not (len(shape) == 1 or several):
        raise ValueError(f"target_tokens of shape {list(shape)} for {len(ids)} tokens")
    for name in wanted:
        values = datum.inputs[name]
        if values.shape != shape:
            raise ValueError(f"{name} of shape {list(values.shape)}, target_tokens have {list(shape)}")
        array = values.array()
        if name == "target_tokens" and (array.min() < 0 or array.max() >= vocabulary):
            raise ValueError(f"a target outside 0 to {vocabulary - 1}")
        if name != "target_tokens" and (values.dtype != "float32" or not np.isfinite(array).all()):
            raise ValueError(f"{name} are finite floats")
