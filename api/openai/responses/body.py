"""The body of POST /v1/responses, and the chat that it comes to.

What comes before its `input` (`previous_response_id`, `conversation`) is looked up elsewhere (`history.py`) and put in
front of it.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator

from api.generation.sampling import MAX_REASONING, DrawFields
from api.generation.structured import Schema
from api.generation.target import first_words
from api.http.fields import Off, RequestModel, complaint
from api.openai.bodies import ChatCompletionRequest
from api.openai.responses.messages import messages_of, without_turns
from api.openai.responses.tools import ResponseTool, ToolName, chosen, left_out_of, offered, own_tools
from api.openai.responses.turns import Items
from api.openai.tools import MAX_TOOLS, Tool, UnservedTool, by_type, custom_is_function, known_type, unserved
from api.webhooks.body import WebhookBody

MAX_NAME = 256  # letters in the name of a response or a conversation


class AllowedTools(RequestModel):
    """Some of the tools, and whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[
        Annotated[
            Annotated[ToolName, Tag("<function>")] | Annotated[UnservedTool, Tag("<unserved>")], custom_is_function
        ]
    ] = Field(min_length=1, max_length=MAX_TOOLS)


LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Of what is not there: tools that OpenAI runs, and images, whose URLs are always shown.
    "message.input_image.image_url",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
Summary = Literal["auto", "concise", "detailed"]


class TextFormat(RequestModel):
    """Form that the answer's text must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None and self.name is not None):
            raise complaint("", "'name' and 'schema' go with type 'json_schema', and with no other")
        return self


class TextConfig(RequestModel):
    """Form and verbosity of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(default=None, description="for templates that know it")


class Reasoning(RequestModel):
    """How much the model reasons. A summary may be asked for, but reasoning comes whole."""

    off: ClassVar[Off] = {"context": ("auto",), "mode": ("standard",)}

    effort: str | None = None
    summary: Summary | None = Field(default=None, description="accepted: reasoning comes whole, and without a summary")
    generate_summary: Summary | None = Field(default=None, description="the older name of `summary`")


class ConversationName(RequestModel):
    """The conversation that the response belongs to."""

    id: str = Field(min_length=1, max_length=MAX_NAME)


def _named_conversation(value: Any) -> Any:
    return {"id": value} if isinstance(value, str) else value


_SAME = {*DrawFields.model_fields, "chat_template_kwargs", "parallel_tool_calls", "prompt_cache_key"}  # as in a chat


class ResponseRequest(DrawFields):
    """Request body of POST /v1/responses."""

    off: ClassVar[Off] = {
        "prompt": (),
        "stream_options": ({}, {"include_obfuscation": False}),
        "moderation": (),
        "access_programs": (),
        "image": (),
    }

    input: Items = Field(default_factory=list, description="may be left out to continue what was said")
    instructions: str | None = Field(default=None, description="a system message before the input")
    webhook: WebhookBody | None = Field(default=None, description="with `background`: a URL to notify of its end")
    store: bool | None = Field(
        default=None, description="keep the response, for others to follow it and for GET; default: if the server does"
    )
    previous_response_id: str | None = Field(
        default=None, min_length=1, max_length=MAX_NAME, description="what was said up to there comes before the input"
    )
    conversation: Annotated[ConversationName | None, BeforeValidator(_named_conversation)] = Field(
        default=None, description="its items come before the input; input and output are added to it"
    )
    background: bool | None = Field(
        default=False, description="answer at once, with a response that goes on without its client"
    )
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = False
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_reasoning_tokens: int | None = Field(
        default=None, ge=0, le=MAX_REASONING, description="reasoning that is not over by then is ended"
    )
    tools: list[ResponseTool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Annotated[
        Literal["none", "auto", "required"]
        | Annotated[
            Annotated[ToolName, Tag("<function>")] | Annotated[AllowedTools, Tag("<allowed_tools>")],
            by_type("function", {"custom": "function"}),
        ]
        | None,
        known_type("function", "custom", "allowed_tools"),
    ] = None
    parallel_tool_calls: bool | None = True
    max_tool_calls: int | None = Field(
        default=None, ge=1, description="of built-in tools, of which there are none: it comes back with the response"
    )
    include: list[Included] | None = Field(default=None, description="what comes besides the text")
    top_logprobs: int | None = Field(default=None, ge=0, le=20, description="with the log-probabilities of `include`")
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="auto: of an input that does not fit the context the oldest turns go"
    )
    metadata: dict[str, str] | None = Field(default=None, description="comes back with the response")
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = Field(
        default=None, description="accepted: there is one tier, and the answer says `default`"
    )
    context_management: list[dict[str, Any]] | None = Field(
        default=None, description="accepted, not used: POST /v1/responses/compact shortens a conversation"
    )
    client_metadata: dict[str, Any] | None = Field(default=None, description="accepted, not used")
    safety_identifier: str | None = Field(default=None, description="accepted, not used")
    prompt_cache_key: str | None = Field(
        default=None, description="of the form of a UUID it names a session; else it is not used"
    )
    prompt_cache_retention: str | None = Field(default=None, description="accepted, not used")
    prompt_cache_options: dict[str, Any] | None = Field(default=None, description="accepted, not used")
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def opening(self) -> str:
        """The user's first text, also when earlier turns stand in front of `input`."""
        return first_words(self.input)

    @model_validator(mode="after")
    def _possible(self) -> "ResponseRequest":
        if not self.input and self.conversation is None and self.previous_response_id is None:
            raise complaint("input", "is required, unless a conversation or a response is gone on with")
        if self.conversation is not None and self.previous_response_id is not None:
            raise complaint("previous_response_id", "'conversation' and 'previous_response_id' exclude each other")
        if (count := sum(1 for _ in own_tools(self.tools or ()))) > MAX_TOOLS:
            raise complaint("tools", f"{count} tools with those of namespaces, and {MAX_TOOLS} is the limit")
        if self.webhook is not None and not self.background:
            raise complaint("webhook", "'webhook' needs 'background': who waits for the answer hears of its end")
        if self.background and self.store is False:
            raise complaint("background", "'background' needs 'store': somebody has to find the response")
        if self.top_logprobs and not self.wants_logprobs:
            raise complaint("top_logprobs", f"'top_logprobs' needs 'include': [\"{LOGPROBS}\"]")
        return self

    @property
    def wants_logprobs(self) -> bool:
        """True if the text is to come with log-probabilities."""
        return LOGPROBS in (self.include or ())

    def messages(self) -> list[dict[str, Any]]:
        """The input as messages of a chat."""
        return messages_of(self.instructions, self.input)

    def chat(self, skipped: int = 0) -> ChatCompletionRequest:
        """The same request to /v1/chat/completions; `skipped`: so many of its oldest turns are left out."""
        body: dict[str, Any] = {
            "messages": without_turns(self.messages(), skipped),
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "verbosity": None if self.text is None else self.text.verbosity,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "max_reasoning_tokens": self.max_reasoning_tokens,
        }
        body |= self.model_dump(mode="json", by_alias=True, exclude_unset=True, include=_SAME)
        if self.tools:
            own = [Tool(type="function", function=each.function) for each in offered(self.tools)]
            body["tools"] = [*own, *unserved(self.tools)]
        body["tool_choice"] = self._choice()
        return ChatCompletionRequest.model_validate(body)

    def _choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, ToolName):
            return self._named(choice)
        if isinstance(choice, AllowedTools):
            allowed = {"mode": choice.mode, "tools": [self._named(each) for each in choice.tools]}
            return {"type": choice.type, "allowed_tools": allowed}
        return choice

    def _named(self, choice: ToolName | UnservedTool) -> Any:
        if isinstance(choice, UnservedTool):
            return choice
        return {"type": "function", "function": {"name": chosen(self.tools or (), choice)}}

    def left_out(self, *, held: bool) -> list[str]:
        """Parts of the request that no model here sees, and functions that this server does not have; `held` as in
        `left_out_of`."""
        found = left_out_of(self.tools or (), held=held) | {item.left_out for item in self.input}
        asked = self.reasoning or Reasoning()
        if {"concise", "detailed"} & {asked.summary, asked.generate_summary}:
            found.add("reasoning.summary")
        if self.service_tier not in (None, "auto", "default"):
            found.add("service_tier")
        if self.context_management:
            found.add("context_management")
        return sorted(found - {""})

    def _format(self) -> dict[str, Any] | None:
        wanted = None if self.text is None else self.text.format
        if wanted is None:
            return None
        if wanted.type != "json_schema":
            return {"type": wanted.type}
        return {"type": wanted.type, "json_schema": {"name": wanted.name, "schema": wanted.schema_}}
