"""`response_format` and vLLM's `structured_outputs`: what a completion must look like, and the grammar for it.

Invariant. Whatever a request asks for here is enforced on every token; what cannot be enforced is refused.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from api.http.fields import Off, RequestModel, complaint
from shared.errors import InvalidGrammarError
from shared.text import grammar

Schema = dict[str, Any] | bool


class JsonSchema(RequestModel):
    """A JSON schema under a name, as OpenAI's clients send it."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = Field(default=None, description="accepted; describe in a message what you want")
    schema_: Schema | None = Field(default=None, alias="schema", description="absent: any JSON object")
    strict: bool | None = Field(default=None, description="the schema is enforced in any case")


class ResponseFormat(RequestModel):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise complaint("json_schema", "'json_schema' goes with type 'json_schema', and with no other")
        return self


class StructuredOutputs(RequestModel):
    """vLLM's: exactly one kind of constraint, and how JSON may be spaced."""

    off: ClassVar[Off] = {"structural_tag": (), "disable_additional_properties": (False,), "disable_fallback": (True,)}

    json_: Schema | str | None = Field(default=None, alias="json", description="a JSON schema, as an object or as text")
    regex: str | None = Field(default=None, min_length=1, description="Rust's syntax, without look-around")
    choice: list[str] | None = Field(default=None, min_length=1, max_length=10_000)
    grammar: str | None = Field(default=None, min_length=1, description="GBNF (EBNF) or Lark")
    json_object: bool | None = None
    disable_any_whitespace: bool | None = Field(default=False, description="JSON without spaces and line breaks")
    whitespace_pattern: str | None = Field(default=None, description="regular expression of what separates JSON tokens")

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        kinds = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(kind is not None for kind in kinds) != 1:
            raise complaint("", "exactly one of 'json', 'regex', 'choice', 'grammar' and 'json_object'")
        if (self.disable_any_whitespace or self.whitespace_pattern) and self.json_ is None and not self.json_object:
            raise complaint("whitespace_pattern", "whitespace is a matter of 'json' and 'json_object' only")
        if self.choice is not None and not all(self.choice):
            raise complaint("choice", "an empty text is no choice")
        return self


def grammar_of_format(wanted: ResponseFormat | None) -> str:
    """The grammar of a `response_format`; "" for text."""
    if wanted is None or wanted.type == "text":
        return ""
    described = wanted.json_schema
    if described is None or described.schema_ is None:
        return grammar.of_object()
    try:
        return grammar.of_schema(described.schema_)
    except InvalidGrammarError as error:
        error.param = "response_format"
        raise


def grammar_of_outputs(wanted: StructuredOutputs | None) -> str:
    """The grammar of vLLM's `structured_outputs`; "" without."""
    if wanted is None:
        return ""
    if wanted.regex is not None:
        return grammar.of_regex(wanted.regex)
    if wanted.choice is not None:
        return grammar.of_choice(wanted.choice)
    try:
        if wanted.grammar is not None:
            return grammar.unconverted(wanted.grammar)
        schema = {"type": "object"} if wanted.json_ is None else grammar.schema_of(wanted.json_)
        return grammar.of_schema(
            schema,
            whitespace=wanted.whitespace_pattern or grammar.WHITESPACE,
            any_whitespace=not wanted.disable_any_whitespace,
        )
    except InvalidGrammarError as error:
        error.param = "structured_outputs"
        raise
