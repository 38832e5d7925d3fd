"""Chat templates: Jinja in a sandbox, with the globals and filters that model repositories expect.

A template comes with a model from the internet and is untrusted: it runs in `ImmutableSandboxedEnvironment`, sees
plain JSON data only, and whatever it raises is the request's error, in the template's own words.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
import jinja2.parser
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequestError


class ChatTemplate:
    """A compiled chat template, run in a sandbox."""

    def __init__(self, source: str) -> None:
        self._template = _environment().from_string(source)

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        """The prompt text of `messages`; InvalidRequestError with the template's words when it refuses them."""
        try:
            return self._template.render(messages=messages, **variables)
        except Exception as error:
            # Whatever untrusted code raises: its refusal, an undefined name, a type it did not expect.
            detail = str(error) or type(error).__name__
            raise InvalidRequestError(f"the model's chat template refuses: {detail}", param="messages") from error


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training masks; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it a set on the class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Parse the tag to its body alone, because the mask that it marks is not used."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would reach the model as `\\u003c`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
