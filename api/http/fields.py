"""Field types of the request schemas: what a value may be, and which values we refuse by name.

A parameter that OpenAI or vLLM knows and we do not support is accepted with a value that means "off"; any other value
is refused, since ignoring it would change what the answer means.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_PROMPTS = 2048  # OpenAI's, of an embedding
MAX_BIASES = 4096
MAX_FIELDS = 512  # of one object whose fields have names

Off = dict[str, tuple[Any, ...]]  # parameters that we do not support -> the values that ask for nothing


def complaint(param: str, reason: str, *, unsupported: bool = False) -> PydanticCustomError:
    """An error that names `param`, a field of the model at hand, as the one to blame."""
    kind = "unsupported" if unsupported else "invalid"
    return PydanticCustomError(kind, "{reason}", {"reason": reason, "param": param})


def check_unicode(value: Any) -> None:
    """Refuse half of a surrogate pair (`"\\ud800"`), which JSON lets pass and no tokenizer and no encoder takes."""
    try:
        msgspec.json.encode(value)  # the quickest way through a large value
    except UnicodeEncodeError:
        raise _half_a_pair() from None
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):  # large numbers, own types
        _look_for_halves(value)


def _half_a_pair() -> PydanticCustomError:
    return PydanticCustomError("unicode", "half of a surrogate pair is not text")


def _look_for_halves(value: Any) -> None:
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise _half_a_pair()
    elif isinstance(value, dict):
        for item in (*value, *value.values()):
            _look_for_halves(item)
    elif isinstance(value, list) and not (value and type(value[0]) is int):  # token ids may be many
        for item in value:
            _look_for_halves(item)


def _fail_fast(schema: Any, of: type[BaseModel]) -> None:
    if isinstance(schema, dict):
        model = schema.get("cls") if schema.get("type") == "model" else None
        if model is not None and model is not of and issubclass(model, RequestModel):
            return  # did so itself, and so did those in it: to look again would take as long as all the rest
        if schema.get("type") in ("list", "tuple"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part, of)
    elif isinstance(schema, list):
        for part in schema:
            _fail_fast(part, of)


class RequestModel(BaseModel):
    """Base of all bodies: unknown fields are refused, and so is what `off` lists unless its value asks for nothing.

    A list is refused at its first wrong item: to name 200,000 of them would take seconds, and one is named. What has
    been read already (`api/http/bodies.py`) is not checked again.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    off: ClassVar[Off] = {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """As pydantic makes it, with lists that fail fast, and for once."""
        schema = handler(source)
        _fail_fast(schema, cls)

        def once(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
            return value if isinstance(value, source) else check(value)

        return core_schema.no_info_wrap_validator_function(once, schema)

    @model_validator(mode="before")
    @classmethod
    def _without_off(cls, data: Any) -> Any:
        check_unicode(data)
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise complaint("", f"{len(data)} fields, and {MAX_FIELDS} is the limit")
        if not isinstance(data, dict) or not cls.off or not (named := data.keys() & cls.off.keys()):
            return data
        for name in sorted(named):
            value = data[name]
            if value is not None and not any(type(value) is type(off) and value == off for off in cls.off[name]):
                raise complaint(name, "this server does not support it", unsupported=True)
        return {name: value for name, value in data.items() if name not in named}


class HistoryModel(RequestModel):
    """Base of what a client sends back from earlier answers, its own or another server's, and of tools.

    Unknown fields are ignored there, as OpenAI and vLLM do: libraries keep books of their own in messages
    (`provider_specific_fields`), and a turn must be answered whichever server wrote the ones before.
    """

    model_config = ConfigDict(extra="ignore")


def _stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise complaint("", "a string or a list of strings")
    if len(stops) > 16 or not all(stops):
        raise complaint("", "at most 16 strings, none of them empty")
    return tuple(stops)


def _prompt(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise complaint("", "a string, token ids, or a non-empty list of either")
    if _is_ids(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise complaint("", f"at most {MAX_PROMPTS} a request")
    if all(isinstance(item, str) for item in value) or all(isinstance(item, list) and _is_ids(item) for item in value):
        return value
    raise complaint("", "strings and token ids cannot be mixed, and ids are integers")


def _is_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _logit_bias(value: Any) -> Any:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise complaint("", "an object of token id to bias")
    if len(value) > MAX_BIASES:
        raise complaint("", f"at most {MAX_BIASES} tokens")
    if wrong := [str(token)[:40] for token in value if not _is_token(token)]:
        more = " and more" if len(wrong) > 8 else ""
        raise complaint("", f"not a token id: {', '.join(map(repr, wrong[:8]))}{more}")
    return {int(token): _bias_amount(token, amount) for token, amount in value.items()}


def _is_token(key: Any) -> bool:
    try:
        int(key)
    except (TypeError, ValueError):
        return False
    return True


def _bias_amount(token: Any, amount: Any) -> float:
    try:
        number = float(amount)
    except (TypeError, ValueError):
        raise complaint("", f"the value of key '{token}' is not a number") from None
    if not -100 <= number <= 100:
        raise complaint("", f"the value of key '{token}' lies outside -100 to 100")
    return number


def _priority(value: Any) -> Any:
    if value is None or (type(value) is int and value == 0):
        return None
    reason = "sequences run in the order in which they come; what goes first is the class of the API key"
    raise complaint("", reason, unsupported=True)


def _truncation(value: Any) -> Any:
    if value == 0 and value is not False:
        raise complaint("", "at least 1, or -1 for what the context leaves")
    return value


Stop = Annotated[
    tuple[str, ...],
    BeforeValidator(_stop),
    Field(default=(), description="up to 16 strings that end the completion", json_schema_extra={"examples": [["\n"]]}),
]
Prompts = Annotated[
    list[str] | list[list[int]],
    BeforeValidator(_prompt),
    WithJsonSchema(
        {
            "description": "text or token ids; a list of several gives several choices",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ],
        }
    ),
]
Priority = Annotated[int | None, BeforeValidator(_priority), Field(default=None, description="0; any other is refused")]
Truncation = Annotated[
    Annotated[int, Field(strict=True, ge=-1, lt=2**63)] | None,
    BeforeValidator(_truncation),
    Field(default=None, description="a longer prompt is cut to so many tokens; -1: to what the context leaves"),
]
TruncationSide = Annotated[
    Literal["left", "right"] | None,
    Field(default=None, description="where it is cut; left, the default, keeps the prompt's end"),
]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_logit_bias),
    Field(default_factory=dict, description="token id -> added to its logit, -100 to 100"),
]


def rfc3339(unix_s: float) -> str:
    """The Unix time by RFC 3339 in UTC, such as 2026-11-30T04:10:18Z; with microseconds unless it is whole seconds."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
