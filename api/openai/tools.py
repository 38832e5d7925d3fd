"""Tools: what a request says of them, and the grammar that makes the model call one.

Invariants. With `tool_choice` "required" or a named function the completion is calls in the model's own form and
nothing else, with arguments of the function's schema. With "auto" the model decides; arguments of functions with
`strict` follow their schema then, too, where the form has marks by which a call is known. Tools of types that this
server does not run are left out of what the model sees, in all protocols; a choice that only these could meet is
refused, because the answer would not be what the request asks for.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, PrivateAttr, Tag, model_validator

from api.generation.free_text import ONE_TEXT, held_to
from api.http.fields import HistoryModel, RequestModel, complaint
from api.openai.text_forms import regex_of
from shared.errors import InvalidGrammarError, InvalidRequestError
from shared.text import grammar
from shared.text.codec import TextCodec
from shared.text.languages.grammars import CallGrammar
from shared.text.languages.language import language_of
from shared.text.languages.tool_form import Signature
from shared.text.languages.tool_forms import form_of

MAX_TOOLS = 512  # agents with many MCP servers send some hundreds


class FunctionDefinition(HistoryModel):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema; absent: no parameters")
    strict: bool | None = Field(default=None, description="arguments follow the schema under `auto`, too")
    _enforced: dict[str, Any] | None = PrivateAttr(default=None)

    @property
    def enforced(self) -> dict[str, Any]:
        """The schema that arguments are held to, which may say more than the one that the model sees."""
        return self._enforced or self.parameters or {}

    def holding(self, schema: dict[str, Any]) -> "FunctionDefinition":
        """The same function, with arguments that are held to another schema than the one that the model sees."""
        held = self.model_copy(update={"strict": True})
        held._enforced = schema
        return held


class CustomFormat(HistoryModel):
    """Form of the text of a custom tool, which the model sees."""

    type: Literal["text", "grammar"]
    syntax: str = ""
    definition: str = ""

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, data: Any) -> Any:
        """A chat's form has its grammar in an object of its own."""
        inner = data.get("grammar") if isinstance(data, dict) else None
        return {**data, **inner} if isinstance(inner, dict) else data


class CustomDefinition(HistoryModel):
    """A tool that takes free text, which the model calls as a function of one text."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    format: CustomFormat | None = None

    @property
    def form(self) -> str:
        """Description of the text's form for the model; "" for any text."""
        if self.format is None or self.format.type == "text":
            return ""
        return f"Its input follows this {self.format.syntax} grammar:\n{self.format.definition}"

    @property
    def regex(self) -> str:
        """Regular expression that the text is held to; "" for none."""
        if self.format is None or self.format.type == "text":
            return ""
        return regex_of(self.format.syntax, self.format.definition)

    def function_named(self, name: str, about: str | None) -> FunctionDefinition:
        """The function, under this name and with this description before that of the text's form."""
        whole = "\n\n".join(filter(None, (about, self.form))) or None
        function = FunctionDefinition.model_construct(name=name, description=whole, parameters=ONE_TEXT)
        return function.holding(held_to(regex)) if (regex := self.regex) else function


def known_type(*known: str) -> BeforeValidator:
    """Refuse things of another `type` by name."""

    def check(value: Any) -> Any:
        kind = value.get("type", known[0]) if isinstance(value, dict) else known[0]
        if kind not in known:
            raise complaint("type", f"type '{kind}' is not supported, only {', '.join(known)}", unsupported=True)
        return value

    return BeforeValidator(check)


def by_type(otherwise: str, same: Mapping[str, str] | None = None, other: str = "") -> Discriminator:
    """Separates the kinds of a union; `same`: types that share the class of another one; `other`: the class of types
    that `same` does not name, "" for their own. A tag is not an identifier,
    so that no error takes it for a field (api/http/errors.py)."""

    def tag(value: Any) -> str:
        kind = str(value.get("type") if isinstance(value, dict) else getattr(value, "type", otherwise))
        return f"<{(same or {}).get(kind, other or kind)}>"

    return Discriminator(tag)


class Tool(HistoryModel):
    """A function among the tools that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class ChatCustomTool(HistoryModel):
    """A tool of a chat that takes free text."""

    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def function(self) -> FunctionDefinition:
        """The function that the model sees."""
        return self.custom.function_named(self.custom.name, self.custom.description)


class UnservedTool(HistoryModel):
    """A tool of a type that this server does not run. The model does not see it, and the answer's header names it."""

    type: str
    name: str = ""


ServedTool = Tool | ChatCustomTool
ChatTool = ServedTool | UnservedTool


def served(tools: Sequence[ChatTool] | None) -> list[ServedTool]:
    """The tools that the model sees."""
    return [tool for tool in tools or () if not isinstance(tool, UnservedTool)]


def unserved(tools: Sequence[Any] | None) -> list[UnservedTool]:
    """The tools that the model does not see."""
    return [tool for tool in tools or () if isinstance(tool, UnservedTool)]


def _serving(*types: str) -> Discriminator:
    """Separates tools of these types, whose class is named by the type, from those of other types."""

    def tag(value: Any) -> str:
        kind = str(value.get("type", types[0]) if isinstance(value, dict) else getattr(value, "type", types[0]))
        return f"<{kind}>" if kind in types and not isinstance(value, UnservedTool) else "<unserved>"

    return Discriminator(tag)


class FunctionName(RequestModel):
    """The function that must be called."""

    name: str


class NamedChoice(RequestModel):
    """The one tool to call."""

    type: Literal["function"]
    function: FunctionName

    @model_validator(mode="before")
    @classmethod
    def _custom(cls, data: Any) -> Any:
        """A custom tool, which is a function to the model."""
        if isinstance(data, dict) and data.get("type") == "custom":
            return {"type": "function", "function": data.get("custom")}
        return data


custom_is_function = by_type("function", {"function": "function", "custom": "function"}, "unserved")
AllowedTool = Annotated[
    Annotated[NamedChoice, Tag("<function>")] | Annotated[UnservedTool, Tag("<unserved>")], custom_is_function
]


class AllowedTools(RequestModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedChoice(RequestModel):
    """OpenAI's way to offer a part of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    def of(self, tools: Sequence[ChatTool] | None) -> list[ChatTool]:
        """Those of the tools that are allowed, with the allowed ones that are not served; InvalidRequestError for one
        that there is not."""
        allowed = self.allowed_tools.tools
        names = {each.function.name for each in allowed if isinstance(each, NamedChoice)}
        if missing := names - {tool.function.name for tool in served(tools)}:
            raise InvalidRequestError(f"no tool is named '{min(missing)}'", param="tool_choice")
        return [*(tool for tool in served(tools) if tool.function.name in names), *unserved(allowed)]


Tools = Annotated[
    list[
        Annotated[Annotated[Tool, Tag("<function>")] | Annotated[UnservedTool, Tag("<unserved>")], _serving("function")]
    ],
    Field(max_length=MAX_TOOLS),
]
ChatTools = Annotated[
    list[
        Annotated[
            Annotated[Tool, Tag("<function>")]
            | Annotated[ChatCustomTool, Tag("<custom>")]
            | Annotated[UnservedTool, Tag("<unserved>")],
            _serving("function", "custom"),
        ]
    ],
    Field(max_length=MAX_TOOLS),
]
ToolChoice = Annotated[
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[NamedChoice, Tag("<function>")] | Annotated[AllowedChoice, Tag("<allowed_tools>")],
        by_type("function", {"custom": "function"}),
    ],
    known_type("function", "custom", "allowed_tools"),
]


class ToolUse(msgspec.Struct, frozen=True):
    """Meaning of a request's tool fields. `shown` are the definitions as the template gets them."""

    shown: list[dict[str, Any]]
    callable: list[FunctionDefinition]  # of them, those that may be called: all, or the named one
    forced: bool
    named: bool
    parallel: bool
    custom: tuple[str, ...] = ()  # names of those that take free text

    @classmethod
    def of(
        cls, tools: Sequence[ChatTool] | None, choice: str | NamedChoice | AllowedChoice | None, parallel: bool | None
    ) -> "ToolUse | None":
        """None when nothing may be called; InvalidRequestError for a choice without its tool, or one that only tools
        could meet that are not served."""
        if isinstance(choice, AllowedChoice):  # the model sees no others
            tools, choice = choice.of(tools), choice.allowed_tools.mode
        absent, own = unserved(tools), served(tools)
        if isinstance(choice, NamedChoice) and all(tool.function.name != choice.function.name for tool in own):
            _refuse_unserved(f"names '{choice.function.name}'", [t for t in absent if t.name == choice.function.name])
            raise InvalidRequestError(f"no tool is named '{choice.function.name}'", param="tool_choice")
        if not own:
            if choice not in (None, "none", "auto"):
                _refuse_unserved(f"is '{choice}'", absent)
                raise InvalidRequestError("'tool_choice' needs 'tools'", param="tool_choice")
            return None
        shown = [{"type": "function", "function": each.function.model_dump(exclude_none=True)} for each in own]
        names = [tool.function.name for tool in own]
        if len(set(names)) < len(names):
            raise InvalidRequestError("two tools have the same name", param="tools")
        if choice == "none":
            return None
        functions = [tool.function for tool in own]
        named = isinstance(choice, NamedChoice)
        if isinstance(choice, NamedChoice):
            functions = [each for each in functions if each.name == choice.function.name]
        custom = tuple(tool.custom.name for tool in own if isinstance(tool, ChatCustomTool))
        one_by_one = parallel is False or named
        return cls(shown, functions, named or choice == "required", named, not one_by_one, custom)

    def grammar(self, codec: TextCodec, otherwise: str = "") -> str:
        """Grammar of the completion; "" when anything goes. `otherwise` is the grammar of an answer without calls."""
        strict = any(each.strict for each in self.callable)
        if not (self.forced or otherwise or strict):
            return ""
        held = self.forced or bool(otherwise)
        functions = [_signature(each, held or bool(each.strict)) for each in self.callable]
        calls = CallGrammar(language_of(codec), functions, self.parallel, grammar.Spelling(codec))
        if self.forced:  # the call wins over a response format: clients that force a tool send its schema as both
            return calls.only()
        return calls.otherwise(otherwise) if otherwise else calls.anywhere()

    def unenforced(self, codec: TextCodec) -> list[str]:
        """Parts of schemas that the answer is held to, which no grammar can enforce: `tools.FUNCTION.PLACE`."""
        form = form_of(language_of(codec).calls)
        places = []
        for function in self.callable:
            if self.forced or (function.strict and form.marks):
                schema, left_out = grammar.enforceable(function.enforced)
                places += [f"{function.name}.{place}" for place in left_out + form.unheld(schema)]
            elif function.strict:  # a call may begin anywhere
                places.append(f"{function.name}.strict")
        return [f"tools.{place}" for place in places]


def _refuse_unserved(asked: str, absent: Sequence[UnservedTool]) -> None:
    """InvalidRequestError if a choice wants one of these tools."""
    if absent:
        kinds = ", ".join(sorted({tool.type for tool in absent}))
        raise InvalidRequestError(
            f"'tool_choice' {asked}, and this server has none of the tools ({kinds}): leave 'tool_choice' out, "
            "or offer a function", param="tool_choice",
        )  # fmt: skip


def left_out_of(tools: Sequence[ChatTool], codec: TextCodec) -> list[str]:
    """Tools that are not served, by their types, and `tools.format` if the model reads the form of a tool's text and is
    not held to it."""
    formed = [tool.custom for tool in tools if isinstance(tool, ChatCustomTool) and tool.custom.form]
    held = bool(form_of(language_of(codec).calls).marks)
    unheld = [] if all(held and custom.regex for custom in formed) else ["tools.format"]
    return sorted({f"tools.{tool.type}" for tool in unserved(tools)}) + unheld


def _signature(function: FunctionDefinition, held: bool) -> Signature:
    """A function as a grammar needs it; one that the answer is not `held` to takes any object."""
    if not held:
        return Signature(function.name, None)
    schema = function.enforced or {"type": "object", "properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        raise InvalidGrammarError(f"the parameters of '{function.name}' are not of type object", param="tools")
    listed = schema.get("enum")
    if isinstance(listed, list) and not any(isinstance(each, dict) for each in listed):
        raise InvalidGrammarError(
            f"the parameters of '{function.name}' have an 'enum' without an object", param="tools"
        )
    grammar.check_size(schema)
    return Signature(function.name, schema)
