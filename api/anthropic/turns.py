"""The turns of a message request: their content blocks, and the messages of a chat that they come to.

Invariant. Turns that come again make the same messages again, so that what a worker has read of a conversation is found
in its prefix cache when the next turn is asked for.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, WithJsonSchema, model_validator

from api.http.fields import HistoryModel, Off, RequestModel, complaint
from api.openai.tools import by_type, known_type
from shared.errors import InvalidRequestError

MAX_TURNS = 4096  # a chat has as many messages
# What Claude Code writes for Anthropic's billing before its system prompt: `x-anthropic-billing-header: ...; cch=...;`
_TELEMETRY = re.compile(r"\s*x-anthropic-[a-z0-9-]+:[^\n]*(?:\n+|\Z)")


class TextBlock(HistoryModel):
    """Text that a user or the model wrote."""

    type: Literal["text"]
    text: str


class ThinkingBlock(HistoryModel):
    """Reasoning of an earlier turn. The model's template decides if the model sees it again."""

    type: Literal["thinking"]
    thinking: str = ""


class RedactedThinkingBlock(HistoryModel):
    """Thinking that another server has encrypted: it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(HistoryModel):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_ONE_OR_MANY = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]})


class ImageSource(HistoryModel):
    """Where an image is: in the request, under a URL of a host that the server may fetch from, or in /v1/files."""

    type: Literal["base64", "url", "file"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = Field(
        default=None, description="of `base64`; the content decides the format"
    )
    data: str | None = None
    url: str | None = None
    file_id: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ImageSource":
        needed = {"base64": "data", "url": "url", "file": "file_id"}[self.type]
        if getattr(self, needed) is None:
            raise complaint(needed, f"a source of type '{self.type}' needs '{needed}'")
        if self.type == "url" and not (self.url or "").lower().startswith("https:"):
            raise complaint("url", "an image's URL begins with https:")
        return self


class ImageBlock(HistoryModel):
    """An image of the user's, or one that a tool has brought."""

    type: Literal["image"]
    source: Annotated[ImageSource, known_type("base64", "url", "file")]

    def part(self) -> dict[str, Any]:
        """The part of a chat's message."""
        source = self.source
        if source.type == "file":
            return {"type": "file", "file": {"file_id": source.file_id}}
        url = source.url if source.type == "url" else f"data:{source.media_type or 'image/png'};base64,{source.data}"
        return {"type": "image_url", "image_url": {"url": url}}


Text = Annotated[list[Annotated[TextBlock, known_type("text")]], BeforeValidator(_parts), _ONE_OR_MANY]


class DocumentSource(HistoryModel):
    """Where a document is, of which only text in the request is read."""

    type: str
    data: str | None = None
    content: Text | None = None

    @property
    def text(self) -> str | None:
        """The document's text; None for a PDF and for what is not in the request."""
        if self.type == "content":
            return "\n".join(part.text for part in self.content or ())
        return self.data if self.type == "text" else None


class DocumentBlock(HistoryModel):
    """A document. The model sees its title and its text; one that a tool has brought and that is no text, in words."""

    off: ClassVar[Off] = {"citations": ({"enabled": False},)}

    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None

    @property
    def is_read(self) -> bool:
        """True if the model sees the document's text."""
        return self.source.text is not None

    @property
    def text(self) -> str:
        """The document as the model sees it: title, context and text, or words that it cannot be read."""
        shown = "[a document, which you cannot read]" if self.source.text is None else self.source.text
        return "\n".join(filter(None, (self.title, self.context, shown)))


class SearchResultBlock(HistoryModel):
    """A passage that a search of the client's own has brought."""

    off: ClassVar[Off] = {"citations": ({"enabled": False},)}

    type: Literal["search_result"]
    source: str
    title: str
    content: Text

    @property
    def text(self) -> str:
        """The passage as the model sees it: title, source and text."""
        return "\n".join([self.title, self.source, *(part.text for part in self.content)])


class LeftOutBlock(HistoryModel):
    """A call of a tool of another server and what it brought, or its summary of a conversation."""

    type: str


LEFT_OUT = (
    "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
    "bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result",
    "mcp_tool_use", "mcp_tool_result", "container_upload", "compaction",
)  # fmt: skip


class ToolReferenceBlock(HistoryModel):
    """A tool that a search for tools has found: from here on the model knows it."""

    type: Literal["tool_reference"]
    tool_name: str


ResultPart = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("<text>")]
        | Annotated[ToolReferenceBlock, Tag("<tool_reference>")]
        | Annotated[DocumentBlock, Tag("<document>")]
        | Annotated[SearchResultBlock, Tag("<search_result>")]
        | Annotated[ImageBlock, Tag("<image>")],
        by_type("text"),
    ],
    known_type("text", "tool_reference", "image", "document", "search_result"),
]


class ToolResultBlock(HistoryModel):
    """Result of a tool call of the turn before."""

    off: ClassVar[Off] = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[ResultPart], BeforeValidator(_parts), _ONE_OR_MANY] | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("<text>")]
        | Annotated[ImageBlock, Tag("<image>")]
        | Annotated[DocumentBlock, Tag("<document>")]
        | Annotated[SearchResultBlock, Tag("<search_result>")]
        | Annotated[LeftOutBlock, Tag("<left-out>")]
        | Annotated[ThinkingBlock, Tag("<thinking>")]
        | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
        | Annotated[ToolUseBlock, Tag("<tool_use>")]
        | Annotated[ToolResultBlock, Tag("<tool_result>")],
        by_type("text", dict.fromkeys(LEFT_OUT, "left-out")),
    ],
    known_type(
        "text",
        "image",
        "document",
        "search_result",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        *LEFT_OUT,
    ),
]
Blocks = Annotated[list[Block], BeforeValidator(_parts), _ONE_OR_MANY]


class MessageTurn(HistoryModel):
    """One message: the user's, the model's, or in the middle of a conversation the system's."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    @model_validator(mode="after")
    def _seen_by_the_model(self) -> "MessageTurn":
        for number, block in enumerate(self.content if self.role != "user" else ()):
            if isinstance(block, ImageBlock | DocumentBlock | SearchResultBlock):
                raise complaint(f"content[{number}]", f"only a message of role 'user' has a block '{block.type}'")
        brought = any(isinstance(block, ToolResultBlock) for block in self.content)  # a client's tool reads any file
        for number, block in enumerate(self.content):
            if isinstance(block, DocumentBlock) and not (block.is_read or brought):
                reason = "only documents of type 'text' and 'content' are read: no PDF, no file, no URL"
                raise complaint(f"content[{number}].source", reason, unsupported=True)
        return self

    def left_out(self) -> Iterator[str]:
        """Blocks that the model does not see, under the names that the answer's header uses."""
        for block in self.content:
            parts = block.content or () if isinstance(block, ToolResultBlock) else (block,)
            for part in parts:
                if isinstance(part, LeftOutBlock) or (isinstance(part, DocumentBlock) and not part.is_read):
                    yield f"messages.{part.type}"


def check_last(turns: Sequence[MessageTurn]) -> None:
    """Refuse a last turn of the assistant that leaves nothing to go on with."""
    last = turns[-1].content
    if turns[-1].role == "assistant" and (not _text(last) or any(isinstance(each, ToolUseBlock) for each in last)):
        reason = "the last message is the assistant's, and the answer goes on with it: it must be text, not a tool use"
        raise complaint("messages", reason)


def places_of_images(turns: Sequence[MessageTurn]) -> Iterator[str]:
    """Where the images of turns stand in the request, in the order that they have in the chat."""
    for at, turn in enumerate(turns):
        for number, block in enumerate(turn.content):
            where = f"messages[{at}].content[{number}]"
            if isinstance(block, ImageBlock):
                yield where
            elif isinstance(block, ToolResultBlock):
                for inner, part in enumerate(block.content or ()):
                    if isinstance(part, ImageBlock):
                        yield f"{where}.content[{inner}]"


Part = str | dict[str, Any]  # of a chat's message: text, or an image


class ChatWriter:
    """Writes turns as messages of a chat. Turns of one role that follow each other are one, as Anthropic has them.

    `tools`: the definitions of those that results may refer to.
    """

    def __init__(self, tools: Mapping[str, dict[str, Any]]) -> None:
        self._tools = tools
        self.chat: list[dict[str, Any]] = []

    def begin(self, system: Sequence[TextBlock]) -> None:
        """The system prompt, without what is not meant for a model."""
        if content := "\n".join(filter(None, (without_telemetry(block.text) for block in system))):
            self.chat.append({"role": "system", "content": content})

    def add(self, turn: MessageTurn) -> None:
        """Append the chat messages that a turn is equivalent to."""
        if turn.role == "assistant":
            self._add_answer(turn.content)
            return
        said: list[Part] = []
        for block in turn.content:
            if isinstance(block, TextBlock | DocumentBlock | SearchResultBlock):
                said.append(block.text)
            elif isinstance(block, ImageBlock):
                said.append(block.part())
            elif isinstance(block, ToolResultBlock):
                if said:
                    self._say(turn.role, said)
                    said = []
                self.chat.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": self._result(block)})
        if said or not turn.content:
            self._say(turn.role, said)

    def _say(self, role: str, parts: list[Part]) -> None:
        if self.chat and self.chat[-1]["role"] == role:
            earlier = self.chat.pop()["content"]
            parts = [*(earlier if isinstance(earlier, list) else [earlier]), *parts]
        elif not parts:
            return
        self.chat.append({"role": role, "content": _content(parts)})

    def _result(self, block: ToolResultBlock) -> Any:
        parts = [self._shown(part) for part in block.content or ()]
        if not block.is_error:
            return _content(parts)
        begun = isinstance(parts[0], str) if parts else False
        return _content([f"Error: {parts[0]}", *parts[1:]] if begun else ["Error: ", *parts])

    def _shown(self, part: ResultPart) -> Part:
        if isinstance(part, ImageBlock):
            return part.part()
        return self._definition(part) if isinstance(part, ToolReferenceBlock) else part.text

    def _definition(self, found: ToolReferenceBlock) -> str:
        """Definition of a tool that was found later. It stands here and not among the others, so that the prompt before
        it is unchanged."""
        if found.tool_name not in self._tools:
            raise InvalidRequestError(f"no tool is named '{found.tool_name[:128]}'", param="messages")
        return f"<tools>\n{json.dumps(self._tools[found.tool_name], ensure_ascii=False)}\n</tools>"

    def _add_answer(self, blocks: Sequence[RequestModel]) -> None:
        """A turn of the model: reasoning, text, calls."""
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ]
        thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        message: dict[str, Any] = {"role": "assistant", "content": _text(blocks)}
        if self.chat and self.chat[-1]["role"] == "assistant" and "tool_calls" not in self.chat[-1]:
            earlier = self.chat.pop()
            message["content"] = earlier["content"] + message["content"]
            thought = earlier.get("reasoning_content", "") + thought
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        self.chat.append(message)


def _content(parts: Sequence[Part]) -> Any:
    """Text, lines of which are broken between its parts; where there are images, the texts around them."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return "\n".join(texts)
    joined: list[dict[str, Any]] = []
    for part in parts:
        if not isinstance(part, str):
            joined.append(part)
        elif joined and joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": f"{joined[-1]['text']}\n{part}"}
        else:
            joined.append({"type": "text", "text": part})
    return joined


def without_telemetry(text: str) -> str:
    """A text of the system prompt without the lines before it that are meant for Anthropic's own servers. They change
    with each request, so they would make each prompt a new one; to the model they say nothing."""
    at = 0
    while found := _TELEMETRY.match(text, at):
        at = found.end()
    return text[at:]


def _text(blocks: Sequence[RequestModel]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))
