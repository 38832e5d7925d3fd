"""Calls of a learner's methods as plain data: one mechanism carries them to wherever the learner computes.

A method that may be called from elsewhere is marked with `@exposed`, and nothing else can be. Its annotations say how
arguments and result travel, as msgpack; arrays go with their dtype and shape, so what comes out is the same to the bit.
A method either returns its result or is `Work` that yields between the units of its computing.
"""

import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from shared.errors import ConflictError
from trainer.learn.compute import Work

F = TypeVar("F", bound=Callable[..., Any])

_KINDS_OF_NUMBERS = "biufc"  # numpy's dtype kinds that are plain numbers


class Call(msgspec.Struct, frozen=True, tag=True):
    """A method's name and its arguments."""

    method: str
    arguments: bytes = b""


@dataclass(frozen=True)
class MethodSignature:
    """Types by which the arguments and the result of an exposed method travel."""

    arguments: msgspec.msgpack.Decoder[tuple[Any, ...]]
    result: msgspec.msgpack.Decoder[Any]
    reads: bool  # it computes nothing and changes nothing


_signatures: dict[tuple[type[Any], str], MethodSignature] = {}


def exposed(method: F) -> F:
    """Let a method be called from elsewhere, also where a subclass overrides it."""
    method.__dict__["reads"] = False
    return method


def exposed_read(method: F) -> F:
    """The same for a method that computes nothing and changes nothing: the ranks of a group need not do it together."""
    method.__dict__["reads"] = True
    return method


def called(learner: Any, method: str, arguments: Sequence[Any]) -> Work[Any]:
    """Call an exposed method and return its result as work; ConflictError for a method that is not exposed."""
    signature_of(type(learner), method)
    result = getattr(learner, method)(*arguments)
    if isinstance(result, Generator):
        return (yield from result)
    return result


def call_of(method: str, arguments: Sequence[Any]) -> Call:
    """A call as plain data."""
    return Call(method, encoded(tuple(arguments))) if arguments else Call(method)


def arguments_of(kind: type, call: Call) -> tuple[Any, ...]:
    """The arguments of a call; ConflictError for a method that is not exposed, or other arguments than it takes."""
    signature = signature_of(kind, call.method)
    try:
        return signature.arguments.decode(call.arguments or b"\x90")
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise ConflictError(f"these are no arguments of {call.method}: {error}") from error


def encoded(value: Any) -> bytes:
    """Arguments, or a result, as `MethodSignature` decodes them."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def signature_of(kind: type[Any], method: str) -> MethodSignature:
    """ConflictError for a method that is not exposed."""
    if (kind, method) not in _signatures:
        _signatures[kind, method] = _signature(kind, method)
    return _signatures[kind, method]


def _signature(kind: type[Any], method: str) -> MethodSignature:
    marked = next(
        (
            owner.__dict__[method]
            for owner in kind.__mro__
            if "reads" in getattr(owner.__dict__.get(method), "__dict__", {})
        ),
        None,
    )
    if marked is None:
        raise ConflictError(f"a {kind.__name__} has no method {method!r} that can be called")
    hints, named = get_type_hints(marked), _parameters(kind)
    names = [name for name in inspect.signature(marked).parameters if name != "self"]
    result = hints.get("return", type(None))
    if get_origin(result) is Generator:
        result = get_args(result)[2]
    types = tuple(_resolved(hints[name], named) for name in names)
    return MethodSignature(
        msgspec.msgpack.Decoder(tuple[types] if types else tuple[()], dec_hook=_array),  # type: ignore[valid-type]
        msgspec.msgpack.Decoder(_resolved(result, named), dec_hook=_array),
        marked.__dict__["reads"],
    )


def _parameters(kind: type) -> dict[Any, Any]:
    """Type arguments that a class's generic bases have been given, by type variable."""
    named: dict[Any, Any] = {}
    for owner in kind.__mro__:
        for base in getattr(owner, "__orig_bases__", ()):
            origin = get_origin(base)
            for variable, value in zip(getattr(origin, "__parameters__", ()), get_args(base), strict=False):
                named.setdefault(variable, named.get(value, value))
    return named


def _resolved(hint: Any, named: dict[Any, Any]) -> Any:
    if isinstance(hint, TypeVar):
        return named[hint]
    if variables := getattr(hint, "__parameters__", ()):
        return hint[tuple(named.get(variable, variable) for variable in variables)]
    return hint


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"a {type(value).__name__} does not travel")


def _array(kind: Any, value: Any) -> Any:
    dtype, shape, data = value
    if np.dtype(dtype).kind not in _KINDS_OF_NUMBERS:
        raise ValueError(f"an array of {dtype} is not one of numbers")
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
