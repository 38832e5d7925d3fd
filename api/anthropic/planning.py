"""From a message request to work: the chat that it comes to, planned as any chat."""

from dataclasses import replace
from functools import partial

import msgspec
from pydantic import ValidationError

from api.anthropic.body import MessagesRequest, PromptedFields
from api.anthropic.turns import places_of_images
from api.callers.fair_pool import aside
from api.generation.choice import RequestPlan
from api.generation.named_images import Keep
from api.generation.plan import PreparedRequest, plan
from api.generation.target import Target
from api.http.anthropic_errors import TOO_LONG
from api.http.errors import from_validation
from api.openai.bodies import ChatCompletionRequest
from api.openai.chat import named_images, prepare_seen, unused_hints
from api.ring.ring import Ring
from shared.errors import ContextLengthExceededError, InvalidRequestError
from shared.sequences import ModelCard
from shared.text.codec import TextCodec
from shared.text.languages.grammars import can_bound
from shared.text.languages.language import language_of

NAMES = {  # of a chat's fields -> ours
    "messages.tool.image": "messages.tool_result.image",
    "prompt": "messages",
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice",
    "stop": "stop_sequences",
}


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


def unused_of(body: PromptedFields, chat: ChatCompletionRequest, codec: TextCodec, card: ModelCard) -> list[str]:
    """Parameters and tools without effect, by our names; the answer's header names them."""
    unused = [NAMES.get(name, name) for name in unused_hints(chat, codec, card)]
    return unused + body.unused(codec.bundle.chat_template, bounded=chat.max_reasoning_tokens is not None)


async def prepare_message(
    ring: Ring,
    card: ModelCard,
    codec: TextCodec,
    body: PromptedFields,
    chat: ChatCompletionRequest,
    keep: Keep | None = None,
) -> PreparedRequest:
    """The prompt and all that goes with it. `keep`: who takes the bytes of its images; None: the tenant's."""
    named = (image.where for image in named_images(chat.messages))
    places = dict(zip(named, places_of_images(body.messages), strict=True))
    try:
        return await prepare_seen(ring, card, codec, chat, keep=keep, places=places)
    except InvalidRequestError as error:
        if error.param in places.values():  # of an image, named as the client has it
            raise
        raise _renamed(error) from None


async def plan_message(
    ring: Ring, body: MessagesRequest, chat: ChatCompletionRequest, target: Target, keep: Keep | None = None
) -> RequestPlan:
    """The plan of a message.

    Clients know a conversation that has become too long by the words of the error, and shorten it.
    """
    prepared = await prepare_message(ring, target.served.card, target.served.codec, body, chat, keep)
    tokens, most = len(prepared.prompts[0]), ring.longest_prompt(target.served.card)
    if tokens > most and body.truncate_prompt_tokens is None:
        raise ContextLengthExceededError(f"{TOO_LONG}: {tokens} tokens > {most} maximum")
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
