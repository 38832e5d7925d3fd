"""POST /v1/chat/completions: messages through the model's chat template, then as any completion."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from api.generation.choice import ReplyPlan
from api.generation.collection import collection_of
from api.generation.plan import reply_plan, target_of, with_grammar, work_for
from api.generation.sampling import check_prompts, room_for, sampling_of, top_of, truncated
from api.generation.structured import grammar_of_format, grammar_of_outputs
from api.generation.target import Target
from api.generation.work import Work
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.openai.bodies import ChatCompletionRequest
from api.openai.conversations import Conversation, conversation
from api.openai.replies import reply
from api.openai.tools import ToolUse
from api.ring.ring import Ring, ring_of
from shared.process.settings import ApiSettings
from shared.text.codec import TextCodec

router = APIRouter(tags=["openai"], route_class=BodyRoute)

UNUSED_HEADER = "x-parallm-unused-parameters"
_NO_HINT = {("reasoning_effort", "none"), ("verbosity", "medium")}  # ask for nothing


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
    chat = await chat_of(target.served.codec, body)
    work, plan = plan_chat(body, chat, target, ring.settings)
    work = await with_grammar(ring, work, target, grammar_param(body))
    response = await reply(ring, request, target.served, work, plan, bool(body.stream))
    return with_unused(response, unused_hints(body, target.served.codec))


async def chat_of(codec: TextCodec, body: ChatCompletionRequest) -> Conversation:
    """The chat as the model gets it."""
    variables = {name: value for name, value in _hints(body).items() if name in codec.bundle.chat_template}
    tools = ToolUse.of(body.tools, body.tool_choice, body.parallel_tool_calls)
    return await conversation(codec, body, tools, **variables)


def _hints(body: ChatCompletionRequest) -> dict[str, Any]:
    """What only a template can follow: how much to reason, and to say."""
    asked = {"reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity}
    return {name: value for name, value in asked.items() if value is not None}


def unused_hints(body: ChatCompletionRequest, codec: TextCodec) -> list[str]:
    """The hints of a request that the model's template does not know: the answer's headers tell of them."""
    asked = _hints(body).items()
    return [name for name, value in asked if name not in codec.bundle.chat_template and (name, value) not in _NO_HINT]


def with_unused(response: Response, unused: list[str]) -> Response:
    """The response, saying which parameters had nobody to follow them."""
    if unused:
        response.headers[UNUSED_HEADER] = ", ".join(unused)
    return response


def plan_chat(
    body: ChatCompletionRequest, chat: Conversation, target: Target, settings: ApiSettings
) -> tuple[Work, ReplyPlan]:
    """What to ask of the workers, and what to make of their tokens. The grammar is not checked here."""
    card = target.served.card
    newer = body.max_completion_tokens is not None
    asked = body.max_completion_tokens if newer else body.max_tokens
    prompt = truncated(chat.prompt, body, card, settings, asked)
    check_prompts([prompt], card, settings, "messages")
    logprobs = top_of((body.top_logprobs or 0) if body.logprobs else None, card, body.logprob_token_ids)
    split = chat.split(body.include_reasoning is not False, older_calls=bool(body.functions))
    plan = reply_plan(body, target, settings, "chat", [prompt], logprobs=logprobs, split=split)
    max_tokens = room_for(
        [prompt],
        card,
        asked,
        settings.default_max_tokens,
        param="max_completion_tokens" if newer else "max_tokens",
        clamp=settings.clamp_max_tokens,
    )
    sampling = sampling_of(
        body,
        card,
        max_tokens,
        top_logprobs=logprobs or None,
        prompt_logprobs=plan.prompt_logprobs,
        logprobs_mode=settings.logprobs_mode,
        codec=target.served.codec,
        shown_tokens=() if split is None else tuple(filter(target.served.codec.is_special, split.marks)),
        grammar=chat.grammar(grammar_of_format(body.response_format) or grammar_of_outputs(body.structured_outputs)),
    )
    return work_for(plan, target, sampling, collect=collection_of(body, target, settings, 1)), plan


def grammar_param(body: ChatCompletionRequest) -> str:
    """The field to blame for a grammar that cannot be compiled."""
    if body.response_format is not None and body.response_format.type != "text":
        return "response_format"
    return "structured_outputs" if body.structured_outputs is not None else "tools"
