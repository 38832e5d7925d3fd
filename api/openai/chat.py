"""POST /v1/chat/completions: messages through the model's chat template, then as any completion."""

import asyncio
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from api.collection import collection_of
from api.errors import error_responses
from api.generation import Work
from api.openai.choices import ReplyPlan
from api.openai.completions import ENCODE_IN_THREAD_CHARS
from api.openai.planning import check_grammar, reply_plan, target_of, work_for
from api.openai.replies import reply
from api.openai.sampling import check_prompts, room_for, sampling_of
from api.openai.schemas import ChatCompletionRequest, ChatMessage
from api.openai.structured import grammar_of_format, grammar_of_outputs
from api.ring import Ring, ring_of
from api.targets import Target
from shared.errors import InvalidRequestError
from shared.settings import ApiSettings
from shared.text import TextCodec

router = APIRouter(tags=["openai"])


class ChatFields(Protocol):
    """What the template needs of a request."""

    @property
    def messages(self) -> list[ChatMessage]:
        """The chat."""

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None:
        """Variables of the template."""

    @property
    def add_generation_prompt(self) -> bool | None:
        """Whether the answer begins."""

    @property
    def add_special_tokens(self) -> bool | None:
        """Whether the tokenizer adds its own."""


_OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@router.post(
    "/v1/chat/completions",
    summary="Answer a chat",
    responses={
        200: {"description": "A chat completion object, or server-sent chunks when `stream` is true"},
        **error_responses(400, 404, 413, 429, 503, 504),
    },
)
async def create_chat_completion(
    body: ChatCompletionRequest, request: Request, ring: Annotated[Ring, Depends(ring_of)]
) -> Response:
    """OpenAI's chat completions for text, with vLLM's extras."""
    target = await target_of(body, request, ring)
    prompt = await encoded_chat(target.served.codec, body)
    work, plan = plan_chat(body, prompt, target, ring.settings)
    await check_grammar(ring, work, target, "response_format" if body.response_format else "structured_outputs")
    return await reply(ring, request, target.served, work, plan, bool(body.stream))


async def encoded_chat(codec: TextCodec, body: ChatFields) -> list[int]:
    """Ids of a chat through the model's template; long ones are encoded in a thread."""
    variables = body.chat_template_kwargs or {}
    if wrong := sorted(variables.keys() & _OWN_VARIABLES):
        raise InvalidRequestError(f"'{wrong[0]}' is not a template variable of its own", param="chat_template_kwargs")
    text = codec.render_chat(
        template_messages(body.messages), add_generation_prompt=body.add_generation_prompt is not False, **variables
    )
    special = bool(body.add_special_tokens)  # the template writes them itself
    if len(text) > ENCODE_IN_THREAD_CHARS:
        return await asyncio.to_thread(codec.encode, text, special)
    return codec.encode(text, special)


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: text as one string, `developer` as `system`, call arguments as objects."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        fields = message.model_dump(exclude_none=True)
        if isinstance(message.content, list):
            fields["content"] = "".join(part.text for part in message.content)
        fields.setdefault("content", "")
        if message.role == "developer":
            fields["role"] = "system"
        if message.tool_calls:
            fields["tool_calls"] = [_with_object_arguments(call) for call in message.tool_calls]
        shown.append(fields)
    return shown


def _with_object_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": msgspec.json.decode(function["arguments"] or "{}")}}
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"'arguments' of a tool call is not JSON: {error}", param="messages") from error


def plan_chat(
    body: ChatCompletionRequest, prompt: list[int], target: Target, settings: ApiSettings
) -> tuple[Work, ReplyPlan]:
    """What to ask of the workers, and what to make of their tokens."""
    card = target.served.card
    check_prompts([prompt], card, settings, "messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    plan = reply_plan(body, target, settings, "chat", [prompt], logprobs=logprobs)
    newer = body.max_completion_tokens is not None
    max_tokens = room_for(
        [prompt],
        card,
        body.max_completion_tokens if newer else body.max_tokens,
        settings.default_max_tokens,
        param="max_completion_tokens" if newer else "max_tokens",
    )
    sampling = sampling_of(
        body,
        card,
        max_tokens,
        top_logprobs=logprobs or None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar_of_format(body.response_format) or grammar_of_outputs(body.structured_outputs),
    )
    return work_for(plan, target, sampling, collect=collection_of(body, target, settings, 1)), plan
