"""POST /v1/chat/completions: messages through the model's chat template, then as any completion."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.generation.named_images import Keep, NamedImage, read_images
from api.generation.plan import PreparedRequest, encoded, plan
from api.generation.structured import grammar_of_format, grammar_of_outputs
from api.generation.target import target_of
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.openai.bodies import ChatCompletionRequest, ChatFields, ChatMessage
from api.openai.conversations import conversation, plain
from api.openai.replies import reply
from api.openai.tools import ToolUse, left_out_of, served
from api.ring.ring import Ring, TheRing
from shared.images.chat import ChatImages
from shared.process.api_settings import ApiSettings
from shared.sequences import ModelCard
from shared.text.codec import TextCodec
from shared.text.languages.language import language_of

router = APIRouter(tags=["openai"], route_class=BodyRoute)
F = TypeVar("F", bound=ChatFields)

UNUSED_HEADER = "x-parallm-unused-parameters"
MAX_NAMES, MAX_NAME = 32, 128  # in that header: schemas may have any number of parts, of any length
_NO_NAME = re.compile(r"[^!-+\--~]")  # letters that a header has no place for, and the comma that separates names
_NO_HINT = {("reasoning_effort", "none"), ("verbosity", "medium")}  # ask for nothing


@router.post(
    "/v1/chat/completions",
    summary="Answer a chat",
    responses=error_responses(ok="A chat completion object, or server-sent chunks when `stream` is true"),
)
async def create_chat_completion(body: ChatCompletionRequest, request: Request, ring: TheRing) -> Response:
    """OpenAI's chat completions for text and images, with vLLM's extras."""
    target = await target_of(ring, body, request, split=True)
    ring = target.ring
    codec = target.served.codec
    prepared = await prepare_seen(ring, target.served.card, codec, body)
    planned = await plan(ring, body, target, prepared)
    response = await reply(ring, codec, planned, bool(body.stream))
    return with_unused(response, unused_hints(body, codec, target.served.card))


def in_words(body: F, card: ModelCard) -> F:
    """A chat with words for the images that tools have brought, if the model sees none: a tool may bring one to any
    model. Images that the user shows stay, and are refused there."""
    if not unseen_images(body, card):
        return body
    shown = []
    for message in body.messages:
        if message.role == "tool" and isinstance(message.content, list):
            words = [part.text if part.type == "text" else UNSEEN_IMAGE for part in message.content]
            message = message.model_copy(update={"content": "\n".join(words)})
        shown.append(message)
    return body.model_copy(update={"messages": shown})


def unseen_images(body: ChatFields, card: ModelCard) -> list[str]:
    """Name of the images of tools that the model does not see, as the answer's header has it; [] without any."""
    unseen = card.vision is None and any(each.role == "tool" and each.has_images for each in body.messages)
    return ["messages.tool.image"] if unseen else []


UNSEEN_IMAGE = "[an image, which you cannot see]"
_NOWHERE: Mapping[str, str] = {}


async def prepare_seen(
    ring: Ring,
    card: ModelCard,
    codec: TextCodec,
    body: ChatCompletionRequest,
    begun: Sequence[int] = (),
    keep: Keep | None = None,
    places: Mapping[str, str] = _NOWHERE,
) -> PreparedRequest:
    """The chat as the model gets it, with its images read, checked and kept as `read_images` does.

    `begun` as in `conversation`. `places`: of images by their place in this chat, where the client has put them.
    """
    body = in_words(body, card)
    named = [image._replace(where=places.get(image.where, image.where)) for image in named_images(body.messages)]
    return await prepare(codec, body, ring.settings, begun, await read_images(ring, card, named, keep))


async def prepare(
    codec: TextCodec,
    body: ChatCompletionRequest,
    settings: ApiSettings,
    begun: Sequence[int] = (),
    images: ChatImages | None = None,
) -> PreparedRequest:
    """The chat as the model gets it, and what only this endpoint knows of it; `begun` as in `conversation`."""
    wanted, blamed = "", "tools"
    if body.response_format is not None and body.response_format.type != "text":
        wanted, blamed = grammar_of_format(body.response_format), "response_format"
    elif body.structured_outputs is not None:
        wanted, blamed = grammar_of_outputs(body.structured_outputs), "structured_outputs"
    tools = ToolUse.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    variables = {name: value for name, value in _hints(body, codec).items() if name in codec.bundle.chat_template}
    chat = await conversation(codec, body, tools, wanted, begun, images, **variables)
    newer = body.max_completion_tokens is not None
    predicted = [] if body.prediction is None else await encoded(codec, [body.prediction.text], False)
    return PreparedRequest(
        chat=True,
        prompts=[chat.prompt],
        max_tokens=body.max_completion_tokens if newer else body.max_tokens,
        default_tokens=settings.default_max_tokens,
        prompt_param="messages",
        max_tokens_param="max_completion_tokens" if newer else "max_tokens",
        grammar_param=blamed,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=chat.grammar,
        split=chat.split,
        prediction=tuple(predicted[0]) if predicted else (),
        images=() if images is None else images.refs,
        messages=[plain(message) for message in body.messages] if settings.feedback_ttl_s else (),
    )


def named_images(messages: Sequence[ChatMessage]) -> Iterator[NamedImage]:
    """The images of messages, in order."""
    for at, message in enumerate(messages):
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            where = f"messages[{at}].content[{number}]"
            if part.file is not None:
                yield NamedImage(where, None, part.file.file_id, part.detail)
            elif part.image_url is not None:
                yield NamedImage(where, part.image_url.url, None, part.detail)


def images_places(messages: Sequence[ChatMessage], given: Sequence[str]) -> dict[str, str]:
    """Where the client has put the images of a chat, by their place in it. `given`: all places, in order; of those that
    a chat without its oldest turns lacks, too."""
    return dict(zip(reversed([image.where for image in named_images(messages)]), reversed(given), strict=False))


def _hints(body: ChatCompletionRequest, codec: TextCodec) -> dict[str, Any]:
    """Parameters that only a template can follow: how much to reason, and how much to say. Kimi K3 has its own name."""
    effort = "thinking_effort" if "thinking_effort" in codec.bundle.chat_template else "reasoning_effort"
    asked = {effort: body.reasoning_effort, "verbosity": body.verbosity}
    return {name: value for name, value in asked.items() if value is not None}


def unused_hints(body: ChatCompletionRequest, codec: TextCodec, card: ModelCard) -> list[str]:
    """Images of tools that the model does not see, hints that its template does not know, a budget of reasoning for a
    model without any, tools that are not served, and parts of tools' schemas that no grammar can enforce."""
    asked = sorted(_hints(body, codec).items() - _NO_HINT)
    unused = unseen_images(body, card)
    unused += [name for name, _ in asked if name not in codec.bundle.chat_template]
    if body.max_reasoning_tokens is not None and language_of(codec).reasoning is None:
        unused.append("max_reasoning_tokens")
    enforced = body.tool_choice not in (None, "none", "auto") or any(
        tool.function.strict for tool in served(body.tools)
    )
    tools = ToolUse.of(body.tools, body.tool_choice, body.parallel_tool_calls) if enforced else None
    unused += left_out_of(body.tools or (), codec)
    return unused if tools is None else unused + tools.unenforced(codec)


def with_unused(response: Response, unused: list[str]) -> Response:
    """The response, with a header that names the parameters without effect."""
    if unused:
        shown = [_NO_NAME.sub("?", name)[:MAX_NAME] for name in unused[:MAX_NAMES]]
        more = [f"and {len(unused) - MAX_NAMES} more"] if len(unused) > MAX_NAMES else []
        response.headers[UNUSED_HEADER] = ", ".join(shown + more)
    return response
