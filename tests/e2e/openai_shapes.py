"""Answers against OpenAI's published shapes, as the openai package carries them (generated from its OpenAPI file)."""

import functools
import json
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter

T = TypeVar("T")


def exact(shape: type[T] | Any, answer: Any, *, ours: frozenset[str] = frozenset()) -> Any:
    """`answer`, which has the shape's fields with the right types, and besides `ours` no field that it lacks."""
    made = _adapter(shape).validate_json(json.dumps(answer), strict=True)
    unknown = set(_unknown(made, "")) - ours
    assert not unknown, f"fields that OpenAI does not know: {unknown}"
    return made


@functools.cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape)  # a second for a large union


def _unknown(value: Any, path: str) -> Any:
    if isinstance(value, BaseModel):
        yield from (f"{path}.{name}" for name in value.model_extra or {})
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for at, each in enumerate(value):
            yield from _unknown(each, f"{path}[{at}]")
