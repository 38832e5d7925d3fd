"""From a message request to work: the chat that it comes to, planned as any chat."""

from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec
from pydantic import ValidationError

from api.anthropic.body import MessagesRequest, PromptedFields
from api.anthropic.turns import places_of_images
from api.callers.fair_pool import aside
from api.generation.choice import RequestPlan
from api.generation.named_images import Keep, read_images
from api.generation.plan import PreparedRequest, plan
from api.generation.target import Target
from api.http.errors import from_validation
from api.openai.bodies import ChatCompletionRequest
from api.openai.chat import named_images, prepare
from api.ring.ring import Ring
from shared.errors import ContextLengthExceededError, InvalidRequestError
from shared.sequences import ModelCard
from shared.text.codec import TextCodec
from shared.text.languages.grammars import can_bound
from shared.text.languages.language import language_of

B = TypeVar("B", bound=PromptedFields)

NAMES = {  # of a chat's fields -> ours
    "prompt": "messages",
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice",
    "stop": "stop_sequences",
}


def seen_by(body: B, card: ModelCard) -> tuple[B, list[str]]:
    """A request as a model sees it, and what of it the model does not see, for the answer's header."""
    seen = body.messages if card.vision is not None else [turn.in_words() for turn in body.messages]
    if all(new is old for new, old in zip(seen, body.messages, strict=True)):
        return body, []
    return body.model_copy(update={"messages": seen}), ["messages.tool_result.image"]


async def chat_of(body: PromptedFields, codec: TextCodec, *, long: bool) -> ChatCompletionRequest:
    """The chat that a request comes to; what is wrong with it is called by our names.

    `long`: it takes a while, and is made off the event loop.
    """
    make = partial(body.chat, codec.bundle.chat_template)
    try:
        chat = await aside(make) if long else make()
    except ValidationError as error:
        raise _renamed(from_validation(error.errors())) from error
    reasoning = language_of(codec).reasoning
    if reasoning is None or not can_bound(reasoning, codec):  # clients send a budget to every model
        chat.max_reasoning_tokens = None
    return chat


async def prepare_message(
    ring: Ring,
    card: ModelCard,
    codec: TextCodec,
    body: PromptedFields,
    chat: ChatCompletionRequest,
    keep: Keep | None = None,
) -> PreparedRequest:
    """The prompt and all that goes with it. `keep`: who takes the bytes of its images; None: the tenant's."""
    places = zip(named_images(chat.messages), places_of_images(body.messages), strict=True)
    images = await read_images(ring, card, [image._replace(where=where) for image, where in places], keep)
    try:
        return await prepare(codec, chat, ring.settings, images=images)
    except InvalidRequestError as error:
        raise _renamed(error) from None


async def plan_message(
    ring: Ring, body: MessagesRequest, chat: ChatCompletionRequest, target: Target, keep: Keep | None = None
) -> RequestPlan:
    """The plan of a message.

    Clients know a conversation that has become too long by the words of the error, and shorten it.
    """
    prepared = await prepare_message(ring, target.served.card, target.served.codec, body, chat, keep)
    tokens, context = len(prepared.prompts[0]), target.served.card.context_length
    most = min(ring.settings.max_prompt_tokens or context, context - 1)
    if tokens > most and body.truncate_prompt_tokens is None:
        raise ContextLengthExceededError(f"prompt is too long: {tokens} tokens > {most} maximum")
    # A call of a named tool ends an answer as any other call does.
    split = prepared.split and msgspec.structs.replace(prepared.split, named=False)
    prepared = replace(prepared, clamp=True, split=split)
    try:
        return await plan(ring, chat, target, prepared)
    except InvalidRequestError as error:
        raise _renamed(error) from None


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    if theirs := error.param:
        bare = theirs.partition(".")[0].partition("[")[0]
        error.param = "messages" if bare == "messages" else NAMES.get(bare, theirs)
        error.message = error.message.replace(f"'{theirs}'", f"'{error.param}'")
    return error
