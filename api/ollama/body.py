"""The bodies of POST /api/chat and /api/generate, and the chats and completions that they come to."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from api.generation.sampling import StrictId
from api.generation.structured import Schema
from api.generation.target import TargetFields, first_words
from api.http.fields import Off, RequestModel, Stop, complaint
from api.ollama.turns import MAX_TURNS, ChatWriter, OllamaMessage, without_oldest
from api.openai.bodies import ChatCompletionRequest, CompletionRequest
from api.openai.tools import Tools

_LATEST = ":latest"  # Ollama's tag of a name without one


class Options(RequestModel):
    """How to draw. Options of Ollama's engine have no effect; the answer's header names them."""

    model_config = ConfigDict(extra="allow")
    off: ClassVar[Off] = {"mirostat": (0,), "typical_p": (1.0, 1), "tfs_z": (1.0, 1)}

    num_predict: int | None = Field(
        default=None, description="tokens of the answer; 0 or less: what the context leaves"
    )
    temperature: float | None = Field(default=0.8, ge=0, description="0 is greedy")
    top_k: int | None = Field(default=40, lt=2**31, description="0 or less: off")
    top_p: float | None = Field(default=0.9, ge=0, le=1)
    min_p: float | None = Field(default=0.0, ge=0, le=1)
    repeat_penalty: float | None = Field(default=1.0, description="of all tokens, not of the last `repeat_last_n`")
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="-1: another one each time")
    stop: Stop

    def drawing(self) -> dict[str, Any]:
        """The same under OpenAI's and vLLM's names."""
        return {
            "temperature": self.temperature,
            "top_k": max(0, self.top_k or 0),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty or None,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": None if self.seed == -1 else self.seed,
            "stop": list(self.stop),
        }

    def unused(self) -> list[str]:
        """Names of options without effect."""
        return [f"options.{name}" for name in self.model_extra or {}]


NAMES = {  # of a chat's and a completion's fields -> ours
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "structured_outputs": "format",
    "reasoning_effort": "think",
    "continue_final_message": "messages",
    "max_tokens": "options.num_predict",
    **{
        name: f"options.{name}"
        for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
    },
}


def bare_name(value: Any) -> Any:
    """A model's name without the tag that Ollama's clients add."""
    return value.removesuffix(_LATEST) if isinstance(value, str) else value


ModelName = Annotated[
    str, BeforeValidator(bare_name), Field(min_length=1, description="as in GET /api/tags; `:latest` may follow it")
]


class ModelFields(TargetFields):
    """Fields that all requests to a model share."""

    model: ModelName
    keep_alive: float | str | None = Field(default=None, description="accepted: models stay with their workers")
    options: Options | None = None

    @property
    def drawn(self) -> Options:
        """The options, which a request may leave out."""
        return self.options or Options.model_validate({})

    def unused(self, template: str) -> list[str]:
        """Parameters without effect; `template`: the model's, which says what it has variables for."""
        return [*(["keep_alive"] if self.keep_alive is not None else []), *self.drawn.unused()]


class AnswerFields(ModelFields):
    """Fields that /api/chat and /api/generate share."""

    stream: bool | None = True
    format: Literal["", "json"] | Schema | None = Field(default=None, description="json, or a JSON schema")
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        default=None, description="a switch or an effort, for templates that know it; false: reasoning is left out"
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    truncate: bool | None = Field(default=True, description="a chat that is too long loses its oldest turns; else 400")
    shift: bool | None = Field(default=None, description="accepted: an answer ends where the context does")

    @property
    def streams(self) -> bool:
        """True unless the request says no: Ollama streams by default."""
        return self.stream is not False

    def chat_of(self, messages: list[dict[str, Any]], template: str, **more: Any) -> ChatCompletionRequest:
        """The request to /v1/chat/completions with these messages."""
        switch = {name: self.think is not False for name in ("enable_thinking", "thinking") if name in template}
        body = {
            "model": self.model,
            "messages": messages,
            "continue_final_message": _goes_on(messages),
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
            "chat_template_kwargs": {} if self.think is None else switch,
            "include_reasoning": self.think is not False,
            "response_format": self._response_format(),
            "logprobs": bool(self.logprobs),
            "top_logprobs": self.top_logprobs if self.logprobs else None,
            **self.drawn.drawing(),
            **more,
        }
        return ChatCompletionRequest.model_validate(body)

    def _response_format(self) -> dict[str, Any] | None:
        if self.format in (None, ""):
            return None
        if self.format == "json":
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}

    def unused(self, template: str) -> list[str]:
        unused = super().unused(template)
        has_switch = "enable_thinking" in template or "thinking" in template
        asked = self.think is not None and (self.think is not False or "think" in template.lower())
        return unused + (["think"] if asked and not has_switch and not isinstance(self.think, str) else [])


def _goes_on(messages: list[dict[str, Any]]) -> bool:
    """True for a last message of the model's: the answer continues it, as Ollama's does."""
    last = messages[-1]
    return last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")


class ChatRequest(AnswerFields):
    """Request body of POST /api/chat."""

    messages: list[OllamaMessage] = Field(
        default_factory=list, max_length=MAX_TURNS, description="none: the answer says at once that the model is there"
    )
    tools: Tools | None = None

    @property
    def opening(self) -> str:
        return first_words(self.messages)

    def chat(self, template: str, skipped: int) -> ChatCompletionRequest:
        """The same request to /v1/chat/completions, without so many of its oldest turns."""
        writer = ChatWriter()
        for message in without_oldest(self.messages, skipped):
            writer.add(message)
        return self.chat_of(
            writer.chat, template, tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        )


class GenerateRequest(AnswerFields):
    """Request body of POST /api/generate."""

    off: ClassVar[Off] = {"suffix": ("",), "template": ("",), "width": (0,), "height": (0,), "steps": (0,)}

    prompt: str | None = Field(default="", description="none: the answer says at once that the model is there")
    system: str | None = None
    images: list[str] | None = Field(default=None, description="base64 of image files")
    context: list[StrictId] | None = Field(
        default=None, description="of an earlier answer, which this one goes on from"
    )
    raw: bool | None = Field(default=False, description="the prompt is the model's whole input, without its template")

    @model_validator(mode="after")
    def _raw_alone(self) -> "GenerateRequest":
        for name in ("system", "images"):
            if self.raw and getattr(self, name):
                raise complaint(name, f"'{name}' does not go with 'raw'")
        return self

    @property
    def opening(self) -> str:
        return (self.prompt or "")[:4096]

    def chat(self, template: str) -> ChatCompletionRequest:
        """The same request to /v1/chat/completions."""
        writer = ChatWriter()
        if self.system:
            writer.add(OllamaMessage(role="system", content=self.system))
        writer.add(OllamaMessage(role="user", content=self.prompt, images=self.images))
        return self.chat_of(writer.chat, template)

    def completion(self) -> CompletionRequest:
        """The same request to /v1/completions, for a raw prompt."""
        outputs = None
        if self.format not in (None, ""):
            outputs = {"json_object": True} if self.format == "json" else {"json": self.format}
        body = {
            "model": self.model,
            "prompt": self.prompt,
            "structured_outputs": outputs,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            **self.drawn.drawing(),
        }
        return CompletionRequest.model_validate(body)
