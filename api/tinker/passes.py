"""Bodies of passes, read apart from the event loop (api/checks/body_readers.py): whose they are, then all of them."""

import msgspec
from pydantic import ValidationError

from api.http.errors import from_validation
from api.http.limits import check_shape
from api.tinker.bodies import GivenPass, PassBody
from api.tinker.protobuf import read_number, read_pass
from shared.errors import InvalidRequestError


class Form(msgspec.Struct, array_like=True):
    """How a body is written, and what it may have."""

    binary: bool = False
    backward: bool = True
    most_values: int = 0  # of JSON
    most_objects: int = 0


class Number(msgspec.Struct, array_like=True):
    """Which request of which learner a body is; "" and 0 where it does not say."""

    model_id: str = ""
    seq_id: int = 0
    backward: bool = True


class _Numbered(msgspec.Struct):
    model_id: str = ""
    seq_id: int = 0


_form = msgspec.msgpack.Decoder(Form)
number_decoder = msgspec.msgpack.Decoder(Number)
pass_decoder = msgspec.msgpack.Decoder(GivenPass)


def number(body: bytes, form: bytes) -> bytes:
    """A `Number`, for which the rest of the body is skipped."""
    asked = _form.decode(form)
    if asked.binary:
        return msgspec.msgpack.encode(Number(*read_number(body)))
    try:
        found = msgspec.json.decode(body, type=_Numbered)
    except msgspec.ValidationError:
        found = _Numbered()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    return msgspec.msgpack.encode(Number(found.model_id, found.seq_id, asked.backward))


def given(body: bytes, form: bytes) -> bytes:
    """The body as a `GivenPass` in msgpack."""
    asked = _form.decode(form)
    return msgspec.msgpack.encode(read_pass(body) if asked.binary else _read_json(body, asked))


def _read_json(body: bytes, form: Form) -> GivenPass:
    check_shape(body, form.most_values, form.most_objects)
    try:
        parsed = PassBody.model_validate(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None
    return parsed.given(backward=form.backward)
