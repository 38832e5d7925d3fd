"""Tinker's protobuf messages, of which only the fields that mean something here are described.

Source: the message descriptors in its SDK (tinker.proto.tinker_public_pb2, package tinker_public); field numbers are
part of the protocol. Fields that are not described are skipped, as protobuf does with those of newer peers.
"""

from collections.abc import Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from api.tinker.bodies import GivenDatum, GivenPass, TensorBody, check_dense, dense, loss_named
from api.tinker.prompts import MOST_CHUNKS, MOST_DATA, ImageChunk, Piece, whole
from api.tinker.wire import check_items, fields, varint
from shared.errors import InvalidRequestError, UnsupportedParameterError
from shared.learners import PassDone, Values

_TYPES = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "double": _TYPES.TYPE_DOUBLE,
    "int64": _TYPES.TYPE_INT64,
    "int32": _TYPES.TYPE_INT32,
    "uint32": _TYPES.TYPE_UINT32,
    "bool": _TYPES.TYPE_BOOL,
    "string": _TYPES.TYPE_STRING,
    "bytes": _TYPES.TYPE_BYTES,
}
# Message -> field -> (number, type); "*": repeated, "?": its presence means something. A map is a repeated entry.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "Tensor": {"dense": (1, "bytes"), "sparse_csr": (2, "SparseCsr"), "dtype": (3, "int32"), "shape": (4, "*int64")},
    "EncodedText": {"tokens": (1, "bytes")},
    "Other": {},
    "Image": {"data": (1, "bytes"), "expected_tokens": (3, "?int32"), "override_dimensions": (4, "Other")},
    "Chunk": {"encoded_text": (1, "EncodedText"), "image": (2, "Image"), "dmel": (3, "Other")},
    "Input": {"key": (1, "string"), "value": (2, "Tensor")},
    "Datum": {"model_input": (1, "*Chunk"), "loss_fn_inputs": (2, "*Input")},
    "Constant": {"key": (1, "string"), "value": (2, "double")},
    "Tagged": {"number": (1, "?double"), "text": (2, "?string")},
    "TaggedConstant": {"key": (1, "string"), "value": (2, "Tagged")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "*Datum"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "*Constant"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "*TaggedConstant"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"),
        "offsets": (2, "bytes"),
        "dtype": (3, "int32"),
        "trailing_shape": (4, "*int64"),
    },
    "Field": {"key": (1, "string"), "value": (2, "BatchedTensor")},
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "*Field"), "num_datums": (3, "int64")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "*ArrayRecord"),
        "metrics": (3, "*Constant"),
    },
    "TopkLogprobs": {
        "token_ids": (1, "bytes"),
        "logprobs": (2, "bytes"),
        "k": (3, "uint32"),
        "length": (4, "uint32"),
    },
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "?bytes"),
        "topk_sampled_logprobs": (4, "TopkLogprobs"),
    },
    "PromptAltTokens": {"tokens": (1, "Tensor"), "logprobs": (2, "Tensor")},
    "SampleResponse": {
        "sequences": (1, "*SampledSequence"),
        "prompt_logprobs": (2, "?bytes"),
        "topk_prompt_logprobs": (3, "TopkLogprobs"),
        "prompt_cache_hit_tokens": (4, "int32"),
        "target_prompt_logprobs": (5, "Tensor"),
        "prompt_alt_tokens": (6, "PromptAltTokens"),
    },
}
MOST_ITEMS = 1 << 18  # of a pass: 4,096 data with four arrays each are half of it
_KINDS = {message: dict(described.values()) for message, described in _MESSAGES.items()}
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_NUMPY = {_FLOAT32: "<f4", _INT64: "<i8"}
_NO_LOGPROB = -99999.0  # of an empty place of a top-k


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="parallm_tinker.proto", package="parallm_tinker", syntax="proto3")
    for name, described in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in described.items():
            base = kind.lstrip("*?")
            label = _TYPES.LABEL_REPEATED if kind.startswith("*") else _TYPES.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, label=label)
            if base in _SCALARS:
                made.type = _SCALARS[base]
            else:
                made.type, made.type_name = _TYPES.TYPE_MESSAGE, f".parallm_tinker.{base}"
            if kind.startswith("?"):
                made.proto3_optional = True
                made.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"parallm_tinker.{name}") for name in _MESSAGES)
    return {each.name: message_factory.GetMessageClass(each) for each in found}


MESSAGE = _classes()


def read_number(body: bytes) -> tuple[str, int, bool]:
    """`model_id`, `seq_id` and True if gradients are asked for, out of a body of forward_backward.

    The body may be cut off: they stand before the data. InvalidRequestError when not even they can be read.
    """
    model, number, backward = "", 0, True
    try:
        for field in islice(fields(body, 0, len(body)), MOST_DATA + 64):
            if field.number == 1 and field.is_bytes:
                model = body[field.start : field.end].decode(errors="replace")
            elif field.number in (2, 6) and not field.is_bytes:
                value, _ = varint(body, field.start, field.end)
                number, backward = (value, backward) if field.number == 2 else (number, not value)
    except InvalidRequestError:
        if not model:
            raise
    return model, number, backward


def read_pass(body: bytes) -> GivenPass:
    """The body of forward_backward; InvalidRequestError when it is none."""
    check_items(body, "ForwardBackwardRequest", _KINDS, MOST_ITEMS)
    message = MESSAGE["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequestError("the body is no ForwardBackwardRequest") from error
    if len(message.data) > MOST_DATA:
        raise InvalidRequestError(f"{len(message.data)} data, and a pass has {MOST_DATA} at most", param="data")
    constants = {each.key: each.value for each in message.loss_fn_config}
    for each in message.loss_fn_config_v2:
        if each.value.HasField("text"):
            raise UnsupportedParameterError(f"'{each.key[:40]}' is a number", param="loss_fn_config")
        constants[each.key] = each.value.number
    tensors = (each.value for datum in message.data for each in datum.loss_fn_inputs)
    check_dense(tensor.shape for tensor in tensors if tensor.HasField("sparse_csr"))
    data = []
    for index, datum in enumerate(message.data):
        try:
            data.append(_datum(datum))
        except ValueError as error:
            raise InvalidRequestError(f"invalid 'data[{index}]': {error}", param=f"data[{index}]") from error
    loss = loss_named(message.loss_fn)
    if message.seq_id < 1:
        raise InvalidRequestError("a request's number is 1 or more", param="seq_id")
    return GivenPass(message.model_id, message.seq_id, data, loss, constants, not message.forward_only)


def _datum(message: Any) -> GivenDatum:
    if len(message.model_input) > MOST_CHUNKS:
        raise ValueError(f"{len(message.model_input)} chunks, and a prompt has {MOST_CHUNKS} at most")
    pieces = list(map(_piece, message.model_input))
    return GivenDatum.of(whole(pieces), {each.key: _values(each.value) for each in message.loss_fn_inputs})


def _piece(chunk: Any) -> Piece:
    if chunk.HasField("encoded_text"):
        return np.frombuffer(chunk.encoded_text.tokens, "<i4")
    if not chunk.HasField("image"):
        raise UnsupportedParameterError("a chunk that is no text and no image is not supported", param="chunks")
    image = chunk.image
    if image.HasField("override_dimensions"):
        raise UnsupportedParameterError("an image is seen in its own size", param="override_dimensions")
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    return ImageChunk(expected, data=image.data)


def _values(tensor: Any) -> Values:
    if tensor.dtype not in _NUMPY:
        raise ValueError(f"an array of dtype {tensor.dtype}")
    kind, shape = _NUMPY[tensor.dtype], list(tensor.shape)
    if not tensor.HasField("sparse_csr"):
        array = np.frombuffer(tensor.dense, kind)
        return Values.of(array.reshape(shape) if shape else array)
    sparse = tensor.sparse_csr
    crow = np.frombuffer(sparse.crow_indices, "<i8").tolist()
    columns = np.frombuffer(sparse.col_indices, "<i8").tolist()
    if any(column < 0 for column in columns):
        raise ValueError("a column below 0")
    return Values.of(dense(np.frombuffer(sparse.values, kind), crow, columns, shape))


def pass_bytes(done: PassDone) -> bytes:
    """A ForwardBackwardOutput. Data of one shape after the first dimension share a record."""
    message = MESSAGE["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for trailing, group in groupby(done.outputs, key=lambda output: next(iter(output.values())).shape[1:]):
        outputs = list(group)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(outputs))
        for name in outputs[0]:
            values = [output[name] for output in outputs]
            offsets = np.cumsum([0, *(len(each.data) for each in values)], dtype="<i8")
            field = record.fields.add(key=name)
            field.value.data = b"".join(each.data for each in values)
            field.value.offsets = offsets.tobytes()
            field.value.dtype = _FLOAT32 if values[0].dtype == "float32" else _INT64
            field.value.trailing_shape.extend(trailing)
    for key, value in done.metrics.items():
        message.metrics.add(key=key, value=value)
    encoded: bytes = message.SerializeToString()
    return encoded


Top = Sequence[Sequence[tuple[int, float]]]  # of each position: token and log-probability, the likeliest first


class Sampled(NamedTuple):
    """Tokens and log-probabilities of one completion."""

    tokens: list[int]
    logprobs: list[float]
    stopped: bool  # else it ran out of room
    top: Top


class PromptSaid(NamedTuple):
    """Log-probabilities of a prompt: of its own tokens, of the likeliest, of those that were named, and of those that
    were drawn."""

    logprobs: Sequence[float | None] | None
    top: Top
    top_k: int
    targets: tuple[TensorBody, npt.NDArray[np.float32]] | None
    drawn: Top
    drawn_k: int


def sample_bytes(sequences: Sequence[Sampled], k: int, prompt: PromptSaid) -> bytes:
    """A SampleResponse; of the prompt only what was asked for."""
    message = MESSAGE["SampleResponse"]()
    for each in sequences:
        made = message.sequences.add(stop_reason=0 if each.stopped else 1)
        made.tokens = np.array(each.tokens, "<i4").tobytes()
        made.logprobs = np.array(each.logprobs, "<f4").tobytes()
        if k:
            made.topk_sampled_logprobs.CopyFrom(_top(each.top, k))
    if prompt.logprobs is not None:
        message.prompt_logprobs = np.array([np.nan if p is None else p for p in prompt.logprobs], "<f4").tobytes()
    if prompt.top_k:
        message.topk_prompt_logprobs.CopyFrom(_top(prompt.top, prompt.top_k))
    if prompt.targets is not None:
        message.target_prompt_logprobs.CopyFrom(_like(*prompt.targets))
    if prompt.drawn_k:
        shape = [len(prompt.drawn), prompt.drawn_k]
        ids = np.array([[token for token, _ in row] for row in prompt.drawn], "<i4")
        logprobs = np.array([[logprob for _, logprob in row] for row in prompt.drawn], "<f4")
        for tensor, values in ((message.prompt_alt_tokens.tokens, ids), (message.prompt_alt_tokens.logprobs, logprobs)):
            tensor.dense, tensor.dtype = values.tobytes(), _INT32 if values is ids else _FLOAT32
            tensor.shape.extend(shape)
    encoded: bytes = message.SerializeToString()
    return encoded


def _like(asked: TensorBody, values: npt.NDArray[np.float32]) -> Any:
    """A Tensor of these values in the layout of what was asked."""
    tensor = MESSAGE["Tensor"](dtype=_FLOAT32, shape=asked.shape or [])
    data = values.astype("<f4").tobytes()
    if asked.sparse_crow_indices is None:
        tensor.dense = data
        return tensor
    tensor.sparse_csr.values = data
    tensor.sparse_csr.crow_indices = np.array(asked.sparse_crow_indices, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(asked.sparse_col_indices, "<i8").tobytes()
    return tensor


def _top(rows: Top, k: int) -> Any:
    ids, logprobs = np.zeros((len(rows), k), "<i4"), np.full((len(rows), k), _NO_LOGPROB, "<f4")
    for at, row in enumerate(rows):
        for rank, (token, logprob) in enumerate(row[:k]):
            ids[at, rank], logprobs[at, rank] = token, logprob
    return MESSAGE["TopkLogprobs"](token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=len(rows))
