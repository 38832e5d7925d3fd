"""From a request to /v1/responses to work: the chat that it comes to, planned as any chat."""

from pydantic import ValidationError

from api.callers.fair_pool import LARGE_COUNT, aside
from api.generation.choice import RequestPlan
from api.generation.named_images import Keep
from api.generation.plan import PreparedRequest, plan
from api.generation.target import Target
from api.http.errors import from_validation
from api.openai.bodies import ChatCompletionRequest
from api.openai.chat import images_places, prepare_seen, unused_hints
from api.openai.fitting import fewest_left_out
from api.openai.responses.body import ResponseRequest
from api.openai.responses.history import NO_HISTORY, ResponseHistory
from api.openai.responses.messages import turn_starts
from api.openai.responses.turns import places_of_images
from api.ring.ring import Ring
from shared.errors import InvalidRequestError
from shared.text.languages.language import language_of
from shared.text.languages.tool_forms import form_of

NAMES = {  # of a chat's fields -> ours
    "messages.tool.image": "input.input_image",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "prompt": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "logprobs": "top_logprobs",
}


async def chat_body(body: ResponseRequest, skipped: int = 0) -> ChatCompletionRequest:
    """The same request to /v1/chat/completions; what is wrong with it is called by our names."""
    try:
        return await aside(body.chat, skipped) if len(body.input) > LARGE_COUNT else body.chat(skipped)
    except ValidationError as error:
        raise _renamed(from_validation(error.errors())) from error


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    theirs = error.param
    field, dot, rest = (error.param or "").partition(".")
    bare, bracket, index = field.partition("[")
    if bare == "messages":
        error.param = "input"
    else:
        error.param = (NAMES.get(bare, bare) + bracket + index + dot + rest) or None
    error.message = error.message.replace(f"'{theirs}'", f"'{error.param}'")
    return error


def unused_of(body: ResponseRequest, chat: ChatCompletionRequest, target: Target) -> list[str]:
    """Parameters, items and tools without effect, by our names; the answer's header names them."""
    codec = target.served.codec
    unused = [NAMES.get(name, name) for name in unused_hints(chat, codec, target.served.card)]
    return unused + body.left_out(held=bool(form_of(language_of(codec).calls).marks))


async def plan_response(
    ring: Ring,
    body: ResponseRequest,
    target: Target,
    history: ResponseHistory = NO_HISTORY,
    keep: Keep | None = None,
) -> tuple[ChatCompletionRequest, RequestPlan]:
    """The chat that a request is equivalent to, and its plan; the parameters as in `prepare_response`."""
    chat, prepared = await prepare_response(ring, body, target, history, keep)
    if body.store is False and chat.collect_trajectory is None:
        chat.collect_trajectory = False  # nor is it kept for feedback
    try:
        return chat, await plan(ring, chat, target, prepared)
    except InvalidRequestError as error:
        raise _renamed(error) from None


async def prepare_response(
    ring: Ring, body: ResponseRequest, target: Target, history: ResponseHistory, keep: Keep | None
) -> tuple[ChatCompletionRequest, PreparedRequest]:
    """The chat that a request is equivalent to, and its prompt.

    `history`: of which the items stand in `body.input` already; the prompt begins with its ids if they mean the same
    text. `keep`: who takes the bytes of its images; None: the tenant's.
    """
    try:
        return await _fitting(ring, body, target, history, keep)
    except InvalidRequestError as error:
        raise _renamed(error) from None


async def _fitting(
    ring: Ring, body: ResponseRequest, target: Target, history: ResponseHistory, keep: Keep | None
) -> tuple[ChatCompletionRequest, PreparedRequest]:
    """The chat; with `truncation: auto` without as few of its oldest turns as it takes to fit the context."""
    card, codec = target.served.card, target.served.codec
    behind = body.max_output_tokens or min(ring.settings.default_max_tokens, card.context_length // 8)
    most = ring.longest_prompt(card, behind)
    places = [*places_of_images(body.input, len(history.items))]

    async def look(skipped: int) -> tuple[bool, tuple[ChatCompletionRequest, PreparedRequest]]:
        chat = await chat_body(body, skipped)
        of_chat = images_places(chat.messages, places)
        prepared = await prepare_seen(ring, card, codec, chat, history.ids, keep, of_chat)
        return len(prepared.prompts[0]) <= most, (chat, prepared)  # what does not fit is refused when it is planned

    return await fewest_left_out(look, len(turn_starts(body.messages())) - 1 if body.truncation == "auto" else 0)
