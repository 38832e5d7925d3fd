"""The JSON bodies of Tinker's SDK (its `types` package), and what they come to."""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, Field

from api.http.fields import Off, RequestModel
from api.tinker.names import ID, SAVE_NAME
from api.tinker.prompts import MOST_CHUNKS, MOST_DATA, Ids, ImageChunk, Piece, whole
from shared.errors import InvalidRequestError, UnsupportedParameterError
from shared.learners import Datum, LossName, StepRequest, Values

Id = Annotated[str, Field(pattern=ID)]
SaveName = Annotated[str, Field(pattern=SAVE_NAME)]
Number = Annotated[int, Field(ge=0, lt=2**31)]
Turn = Annotated[int, Field(ge=1, lt=2**31)]  # of a learner's requests; the one that makes it has none
LONGEST_METADATA = 16 << 10


def _short(metadata: dict[str, Any]) -> dict[str, Any]:
    if len(str(metadata)) > LONGEST_METADATA:  # it is read with whatever it belongs to, again and again
        raise ValueError(f"metadata is at most {LONGEST_METADATA} characters long")
    return metadata


Metadata = Annotated[dict[str, Any], AfterValidator(_short)] | None
Texts = Annotated[dict[str, str], AfterValidator(_short)] | None
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LONGEST_TTL_S = 10 * 366 * 86_400
MOST_DENSE = 2**23  # values of a pass's sparse arrays, written out
MOST_DRAWS = 20  # at one place of a prompt


class Body(RequestModel):
    """Base of most bodies; the `type` that the SDK sends has no effect."""

    type: str | None = None


class SessionBody(Body):
    """Request body of POST create_session."""

    tags: list[str] = Field(default=[], max_length=64)
    user_metadata: Metadata = None
    sdk_version: str = Field(default="", max_length=256)
    project_id: str | None = Field(default=None, description="accepted, not used")
    display_name: str | None = Field(default=None, max_length=256)


class SessionId(Body):
    """Request body of POST session_heartbeat."""

    session_id: Id


class LoraBody(RequestModel):
    """Layers that get an adapter; the output layer never does."""

    rank: int = Field(ge=1, le=256)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class ModelBody(Body):
    """Request body of POST create_model."""

    session_id: Id
    model_seq_id: Number
    base_model: str = Field(max_length=512)
    user_metadata: Metadata = None
    lora_config: LoraBody | None = None
    optimizer_config: dict[str, Any] | None = None


class ModelId(Body):
    """Body of POST get_info and unload_model."""

    model_id: Id


class AdamBody(RequestModel):
    """Parameters of AdamW for one step."""

    learning_rate: Positive = 1e-4
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: Positive = 1e-12
    weight_decay: Positive = 0.0
    grad_clip_norm: Positive = 0.0


class StepBody(Body):
    """Request body of POST optim_step."""

    off: ClassVar[Off] = {"optimizer_params": ()}

    model_id: Id
    seq_id: Turn
    adam_params: AdamBody

    def request(self) -> StepRequest:
        """The step as a request to the learner."""
        adam = self.adam_params
        decay, clip = adam.weight_decay, adam.grad_clip_norm
        return StepRequest(adam.learning_rate, adam.beta1, adam.beta2, adam.eps, decay, clip)


class SaveBody(Body):
    """Request body of POST save_weights."""

    model_id: Id
    seq_id: Turn
    path: SaveName | None = None
    ttl_seconds: int | None = Field(default=None, ge=1, le=LONGEST_TTL_S)
    overwrite: bool = True
    user_metadata: Texts = None


class ExternalBody(Body):
    """Request body of POST save_weights_external."""

    off: ClassVar[Off] = {"age_encryption_recipients": ([],)}

    model_id: Id
    seq_id: Turn
    path: SaveName
    ttl_seconds: int | None = Field(default=None, ge=1, le=LONGEST_TTL_S)


class PublishBody(Body):
    """Request body of POST save_weights_for_sampler."""

    model_id: Id
    seq_id: Turn
    path: SaveName | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = Field(default=None, ge=1, le=LONGEST_TTL_S)
    user_metadata: Texts = None


class LoadBody(Body):
    """POST load_weights; with `session_id` and `model_seq_id` it makes the learner, too."""

    off: ClassVar[Off] = {"weights_access_token": ()}

    model_id: Id | None = None
    seq_id: Turn | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: str | None = Field(default=None, max_length=512)
    user_metadata: Metadata = None
    path: str = Field(max_length=512)
    optimizer: bool
    optimizer_config: dict[str, Any] | None = None


class SamplerBody(Body):
    """Request body of POST create_sampling_session."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: str | None = Field(default=None, max_length=512)
    model_path: str | None = Field(default=None, max_length=512)


class ChunkBody(RequestModel):
    """A piece of a prompt: tokens, an image's bytes in base64, or an image's address."""

    type: str = "encoded_text"
    tokens: list[int] | None = None
    data: str | None = None
    location: str | None = None
    format: Literal["png", "jpeg"] | None = Field(default=None, description="not used: the bytes decide")
    expected_tokens: Number | None = None

    def piece(self) -> Piece:
        """Content of the chunk; InvalidRequestError for one of no type, UnsupportedParameterError for sound and
        others."""
        if self.type == "encoded_text" and self.tokens is not None:
            return self.tokens
        if self.type == "image" and self.data is not None:
            return ImageChunk(self.expected_tokens, url=f"data:;base64,{self.data}")
        if self.type == "image_asset_pointer" and self.location is not None:
            return ImageChunk(self.expected_tokens, url=self.location)
        if self.type in _CHUNKS:
            message = f"a chunk of type {self.type!r} has {_CHUNKS[self.type]!r}"
            raise InvalidRequestError(message, param="chunks")
        raise UnsupportedParameterError(f"a chunk of type {self.type[:40]!r} is not supported", param="chunks")


class InputBody(RequestModel):
    """A prompt as a list of chunks."""

    chunks: list[ChunkBody] = Field(max_length=MOST_CHUNKS)

    def pieces(self) -> list[Piece]:
        """Tokens of the prompt, as one piece where there are no images between them."""
        return whole([chunk.piece() for chunk in self.chunks])


class TensorBody(RequestModel):
    """An array as a list of numbers with its type and shape."""

    data: list[int] | list[float]
    dtype: Literal["float32", "int64"]
    shape: list[Number] | None = Field(default=None, max_length=2)
    sparse_crow_indices: list[Number] | None = None
    sparse_col_indices: list[Number] | None = None

    def values(self) -> Values:
        """As bytes; InvalidRequestError when its numbers are not of its shape."""
        try:
            array = np.array(self.data, np.dtype(self.dtype))
            if self.sparse_crow_indices is not None:
                column = self.sparse_col_indices or []
                return Values.of(dense(array, self.sparse_crow_indices, column, self.shape or []))
            return Values.of(array if self.shape is None else array.reshape(self.shape))
        except (ValueError, OverflowError, IndexError) as error:
            raise InvalidRequestError(f"this is no array: {error}", param="loss_fn_inputs") from error


class DatumBody(RequestModel):
    """One sequence of a pass."""

    off: ClassVar[Off] = {"model_input_spans": ([],), "loss_fn_input_spans": ([],)}

    model_input: InputBody
    loss_fn_inputs: dict[str, TensorBody] = Field(max_length=16)

    def given(self) -> "GivenDatum":
        """The datum as the learner takes it, before it is checked."""
        inputs = {name: tensor.values() for name, tensor in self.loss_fn_inputs.items()}
        return GivenDatum.of(self.model_input.pieces(), inputs)


class GivenDatum(NamedTuple):
    """A datum whose images have not been looked at."""

    pieces: list[bytes | ImageChunk]  # token ids [L] as int32, little-endian
    inputs: dict[str, Values]

    @classmethod
    def of(cls, pieces: list[Piece], inputs: dict[str, Values]) -> "GivenDatum":
        """InvalidRequestError for numbers that are no token ids."""
        return cls([piece if isinstance(piece, ImageChunk) else tokens_of(piece) for piece in pieces], inputs)

    @property
    def text(self) -> Datum | None:
        """One of text alone; None for others."""
        (first, *more) = self.pieces
        return Datum(first, self.inputs) if isinstance(first, bytes) and not more else None

    def prompt(self) -> list[Piece]:
        """The datum's pieces in the form of a prompt, so that its images can be read."""
        return [np.frombuffer(piece, "<i4") if isinstance(piece, bytes) else piece for piece in self.pieces]


class GivenPass(NamedTuple):
    """A pass likewise, and which learner's which it is."""

    model_id: str
    seq_id: int
    data: list[GivenDatum]
    loss: LossName
    constants: dict[str, float]
    backward: bool


class PassInput(RequestModel):
    """Data, and what its loss is."""

    data: list[DatumBody] = Field(min_length=1, max_length=MOST_DATA)
    loss_fn: str
    loss_fn_config: dict[str, float] | None = None


class PassBody(Body):
    """POST forward_backward and forward; either field."""

    model_id: Id
    seq_id: Turn
    forward_backward_input: PassInput | None = None
    forward_input: PassInput | None = None

    def given(self, *, backward: bool) -> GivenPass:
        """The pass as the learner takes it, before it is checked."""
        given = self.forward_backward_input or self.forward_input
        if given is None:
            raise InvalidRequestError("there is no 'forward_backward_input'", param="forward_backward_input")
        tensors = (tensor for each in given.data for tensor in each.loss_fn_inputs.values())
        check_dense(tensor.shape or () for tensor in tensors if tensor.sparse_crow_indices is not None)
        data = [each.given() for each in given.data]
        loss, constants = loss_named(given.loss_fn), given.loss_fn_config or {}
        return GivenPass(self.model_id, self.seq_id, data, loss, constants, backward)


class SampleParams(RequestModel):
    """How a completion is drawn. `stop`: null stops at the model's end, [] nowhere, else at these."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_k: int = Field(default=-1, ge=-1, lt=2**31)
    top_p: float = Field(default=1.0, ge=0, le=1)


class SampleBody(Body):
    """Request body of POST asample."""

    off: ClassVar[Off] = {"record_stability_info": (False,)}

    num_samples: int = Field(default=1, ge=1, le=256)
    prompt: InputBody
    sampling_params: SampleParams
    base_model: str | None = Field(default=None, max_length=512)
    model_path: str | None = Field(default=None, max_length=512)
    sampling_session_id: Id | None = None
    seq_id: int | None = Field(default=None, ge=0, lt=2**63)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=20)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=20)
    target_prompt_logprobs: TensorBody | None = None
    prompt_alt_tokens_k: int = Field(default=0, ge=0, le=MOST_DRAWS)
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1, lt=2**31)


class FutureBody(Body):
    """Body of POST retrieve_future and cancel_future."""

    request_id: str = Field(pattern=r"^[A-Za-z0-9:_-]{1,192}$")
    allow_metadata_only: bool = False


class PathBody(Body):
    """Request body of POST weights_info."""

    tinker_path: str = Field(max_length=512)


class TtlBody(Body):
    """PUT ttl; null: as long as the service keeps saves."""

    ttl_seconds: int | None = Field(default=None, ge=1, le=LONGEST_TTL_S)


NO_TOKEN = "a token id is a number from 0 on"
_CHUNKS = {"encoded_text": "tokens", "image": "data", "image_asset_pointer": "location"}  # what each type needs
LOSSES: dict[str, LossName] = {
    "cross_entropy": "cross_entropy",
    "importance_sampling": "importance_sampling",
    "ppo": "ppo",
    "cispo": "cispo",
    "dro": "dro",
}


def loss_named(name: str) -> LossName:
    """UnsupportedParameterError for a loss that we do not know."""
    if name not in LOSSES:
        raise UnsupportedParameterError(f"no loss {name[:40]!r}: {', '.join(LOSSES)}", param="loss_fn")
    return LOSSES[name]


def tokens_of(given: Ids) -> bytes:
    """Token ids as a datum has them; InvalidRequestError for numbers that are none."""
    try:
        ids = np.array(given, np.int64)
    except OverflowError as error:
        raise InvalidRequestError(NO_TOKEN, param="model_input") from error
    if ids.size and (ids.min() < 0 or ids.max() >= 2**31):
        raise InvalidRequestError(NO_TOKEN, param="model_input")
    return ids.astype("<i4").tobytes()


def check_dense(shapes: Iterable[Sequence[int]]) -> None:
    """InvalidRequestError when sparse arrays, of which a few bytes may stand for gigabytes, are too large together."""
    if (values := sum(math.prod(max(0, size) for size in shape) for shape in shapes)) > MOST_DENSE:
        message = f"the sparse arrays of a pass have at most {MOST_DENSE} places together, these have {values}"
        raise InvalidRequestError(message, param="loss_fn_inputs")


def dense(values: Any, crow: list[int], columns: list[int], shape: list[int]) -> Any:
    """The array [R, C] of a sparse one in CSR; ValueError when it is none."""
    if len(shape) != 2 or min(shape) < 0 or len(crow) != shape[0] + 1 or len(columns) != len(values):
        raise ValueError("a sparse array has two dimensions, a row pointer for each row, and a column for each value")
    counts = np.array(crow[1:], np.int64) - np.array(crow[:-1], np.int64)
    if crow[0] != 0 or crow[-1] != len(values) or (counts < 0).any() or (columns and max(columns) >= shape[1]):
        raise ValueError("its row pointers or its columns are not those of its shape")
    whole = np.zeros(shape, values.dtype)
    whole[np.repeat(np.arange(shape[0]), counts), np.array(columns, np.int64)] = values
    return whole
