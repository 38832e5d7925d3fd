"""The bodies of POST /v1/messages and /v1/messages/count_tokens, and the chat that they come to."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from api.anthropic.turns import MAX_TURNS, ChatWriter, MessageTurn, Text, check_last
from api.generation.sampling import MAX_REASONING, DrawFields
from api.generation.structured import Schema
from api.generation.target import TargetFields, first_words
from api.http.fields import HistoryModel, Off, RequestModel, complaint
from api.openai.bodies import ChatCompletionRequest
from api.openai.tools import MAX_TOOLS, UnservedTool, known_type, unserved


class MessageTool(HistoryModel):
    """A tool that the client runs."""

    off: ClassVar[Off] = {"allowed_callers": (["direct"],)}

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(default=None, description="the input follows the schema under `auto`, too")
    defer_loading: bool | None = Field(
        default=None, description="the tool is shown to the model where a `tool_reference` names it, not before"
    )

    def shown(self) -> dict[str, Any]:
        """The tool of a chat."""
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        given = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": {**given, "parameters": self.input_schema}}


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<custom>" if kind in (None, "custom") else "<server>"


AnyTool = Annotated[
    Annotated[MessageTool, Tag("<custom>")] | Annotated[UnservedTool, Tag("<server>")], Discriminator(_kind)
]


class MessageToolChoice(RequestModel):
    """Says if a tool must be called, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="goes with `tool`")
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> "MessageToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise complaint("name", "'name' goes with type 'tool', and with no other")
        return self

    def shown(self) -> Any:
        """The choice of a chat."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingConfig(RequestModel):
    """Says if the model reasons first, where its template has a switch for that, and how its reasoning is shown."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(
        default=None, ge=1, le=MAX_REASONING, description="goes with `enabled`: reasoning that is longer is ended"
    )
    display: Literal["summarized", "omitted", "updates"] | None = Field(
        default=None, description="omitted, updates: thinking blocks come without their text; else it comes whole"
    )

    @model_validator(mode="after")
    def _budgeted(self) -> "ThinkingConfig":
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise complaint("budget_tokens", "'budget_tokens' goes with type 'enabled', and with no other")
        return self

    @property
    def omits_text(self) -> bool:
        """True for `omitted`, and for `updates`: it shows notes on progress, which only Anthropic's models write."""
        return self.display in ("omitted", "updates")

    def variables(self) -> dict[str, Any]:
        """The switch and the budget under the names that templates of reasoning models use."""
        asked = {"enable_thinking": self.type != "disabled", "thinking": self.type != "disabled"}
        return asked if self.budget_tokens is None else {**asked, "thinking_budget": self.budget_tokens}


_NO_THINKING = ThinkingConfig(type="disabled")  # of a request that does not say


class JsonFormat(RequestModel):
    """Form that the answer's text must have."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(RequestModel):
    """Form and effort of the answer."""

    off: ClassVar[Off] = {"task_budget": ()}

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="for templates that know `reasoning_effort`"
    )
    format: JsonFormat | None = None


class ContextEdit(HistoryModel):
    """An edit that would shorten earlier turns: none is made, and the answer's header names it."""

    type: str
    keep: Any = None

    @property
    def asks_nothing(self) -> bool:
        """True if the thinking of earlier turns is to stay, as it does: what Claude Code sends."""
        return self.type == "clear_thinking_20251015" and self.keep == "all"


class ContextManagement(RequestModel):
    """The edits of earlier turns that a client asks for (Anthropic's context editing)."""

    edits: list[ContextEdit] = Field(default_factory=list, max_length=64)


class PromptedFields(RequestModel):
    """All that becomes the prompt."""

    messages: Annotated[list[MessageTurn], Field(min_length=1, max_length=MAX_TURNS)]
    system: Text | None = Field(default=None, description="a text, or text blocks")
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = Field(default=None, description="default: auto, if there are tools")
    thinking: Annotated[ThinkingConfig, known_type("enabled", "adaptive", "disabled")] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(default=None, description="the older form of `output_config.format`")
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = Field(default=None, description="accepted: the cache is automatic")
    mcp_servers: list[dict[str, Any]] | None = Field(
        default=None, max_length=64, description="accepted: this server calls no others, and the header says so"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables of the chat template")

    @model_validator(mode="after")
    def _possible(self) -> "PromptedFields":
        check_last(self.messages)
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise complaint("output_format", "'output_format' and 'output_config.format' say the same twice")
        return self

    @property
    def own_tools(self) -> list[MessageTool]:
        """The tools that the client runs."""
        return [tool for tool in self.tools or () if isinstance(tool, MessageTool)]

    def chat(self, template: str) -> ChatCompletionRequest:
        """The same request to /v1/chat/completions; `template`: the model's, which says what it has variables for.

        InvalidRequestError for a reference to a tool that is not there.
        """
        writer = ChatWriter({tool.name: tool.shown() for tool in self.own_tools})
        writer.begin(self.system or [])
        for turn in self.messages:
            writer.add(turn)
        return ChatCompletionRequest.model_validate({**self._fields(template), "messages": writer.chat})

    def _fields(self, template: str) -> dict[str, Any]:
        """Fields of the equivalent chat, without the messages."""
        config, choice = self.output_config or OutputConfig(), self.tool_choice
        wanted = config.format or self.output_format
        named = None if choice is None else choice.name
        body: dict[str, Any] = {
            "continue_final_message": self.messages[-1].role == "assistant",
            "reasoning_effort": config.effort,
            "max_reasoning_tokens": None if self.thinking is None else self.thinking.budget_tokens,
            "chat_template_kwargs": self._variables(template),
            "tools": [*(tool.shown() for tool in self.own_tools if not tool.defer_loading or tool.name == named),
                      *unserved(self.tools)],
        }  # fmt: skip
        if wanted is not None:
            described = {"name": "output", "schema": wanted.schema_}
            body["response_format"] = {"type": "json_schema", "json_schema": described}
        if choice is not None:
            body["tool_choice"] = choice.shown()
            body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return body

    def _variables(self, template: str) -> dict[str, Any]:
        asked = (self.thinking or _NO_THINKING).variables()
        known = {name: value for name, value in asked.items() if name in template}
        return {**known, **(self.chat_template_kwargs or {})}

    def unused(self, template: str, *, bounded: bool) -> list[str]:
        """Parameters that the model or the server cannot follow; the answer's header names them.

        `bounded`: reasoning has a bound, for which the template needs no variable.
        """
        absent = sorted({name for turn in self.messages for name in turn.left_out()})
        edits = () if self.context_management is None else self.context_management.edits
        absent += [f"context_management.{edit.type}" for edit in edits if not edit.asks_nothing]
        absent += ["mcp_servers"] if self.mcp_servers else []
        if self.thinking is None:
            return absent
        nothing_to_switch = self.thinking.type == "disabled" and "think" not in template.lower()
        unused = [] if "thinking" in template or nothing_to_switch else ["thinking"]
        budgeted = self.thinking.budget_tokens is None or bounded or "thinking_budget" in template
        return [*absent, *unused, *([] if budgeted else ["thinking.budget_tokens"])]


class CountRequest(TargetFields, PromptedFields):
    """Request body of POST /v1/messages/count_tokens."""

    off: ClassVar[Off] = {"speed": ("standard",)}


_SAME = {*DrawFields.model_fields} - {"stop"}  # as in a chat


class MessagesRequest(DrawFields, PromptedFields):
    """Request body of POST /v1/messages."""

    off: ClassVar[Off] = {
        "stop": (),
        "container": (),
        "inference_geo": (),
        "speed": ("standard",),
        "safeguards": ([],),  # who asks for them relies on verdicts about each call
    }

    max_tokens: int = Field(
        ge=0, description="more than the context leaves comes to what it leaves; 0: the prompt is read into the cache"
    )
    stream: bool | None = False
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = Field(
        default=None,
        description="`user_id` stays with its choice of an adapter split, and may name a session; nothing else is used",
    )
    service_tier: Literal["auto", "standard_only"] | None = Field(default=None, description="there is one tier")
    diagnostics: dict[str, Any] | None = Field(default=None, description="answered with `unavailable`")

    @property
    def session(self) -> str:
        """Anthropic's name for who asks, else ours."""
        given = (self.metadata or {}).get("user_id")
        return given if isinstance(given, str) and given else super().session

    @property
    def opening(self) -> str:
        """The user's first text. The system's text is left out, since it may have lines that change with each turn."""
        return first_words(self.messages)

    @property
    def shows_thinking(self) -> bool:
        """True if the answer shows reasoning, which a request has to ask for."""
        return (self.thinking or _NO_THINKING).type != "disabled"

    def _fields(self, template: str) -> dict[str, Any]:
        same = self.model_dump(mode="json", by_alias=True, exclude_unset=True, include=_SAME)
        chat = {**same, **super()._fields(template), "max_tokens": max(1, self.max_tokens)}
        chat.setdefault("user", self.session or None)
        return {**chat, "stop": self.stop_sequences, "include_reasoning": self.shows_thinking}
