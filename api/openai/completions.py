"""POST /v1/completions: text or token ids in, text (and token ids) out."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from api.generation.choice import ReplyPlan
from api.generation.collection import collection_of
from api.generation.plan import encoded, reply_plan, target_of, with_grammar, work_for
from api.generation.sampling import check_prompts, room_for, sampling_of, top_of, truncated
from api.generation.structured import grammar_of_outputs
from api.generation.target import Target
from api.generation.work import Work
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.openai.bodies import CompletionRequest
from api.openai.replies import reply, whole_body
from api.ring.ring import Ring, ring_of
from shared.errors import InvalidRequestError
from shared.frames import Finish, TokenEvent
from shared.process.settings import ApiSettings
from shared.sequences import ModelCard
from shared.text.codec import TextCodec

router = APIRouter(tags=["openai"], route_class=BodyRoute)

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_CHOICES = 1024


@router.post(
    "/v1/completions",
    summary="Complete text",
    responses={
        200: {"description": "A completion object, or server-sent chunks when `stream` is true"},
        **error_responses(400, 404, 413, 429, 503, 504),
    },
)
async def create_completion(
    body: CompletionRequest, request: Request, ring: Annotated[Ring, Depends(ring_of)]
) -> Response:
    """OpenAI's legacy completions with vLLM's extras: token ids in and out, prompt log-probabilities, n samples."""
    target = await target_of(body, request, ring)
    served = target.served
    prompts = await encoded(served.codec, body.prompt, body.add_special_tokens is not False)
    work, plan = plan_completion(body, prompts, target, ring.settings)
    work = await with_grammar(ring, work, target, "structured_outputs")
    if plan.scores_only and plan.logprobs is None and plan.prompt_logprobs is None and not body.stream:
        return Response(_echoed(plan, served.codec), media_type="application/json")
    return await reply(ring, request, served, work, plan, bool(body.stream))


def plan_completion(
    body: CompletionRequest, prompts: list[list[int]], target: Target, settings: ApiSettings
) -> tuple[Work, ReplyPlan]:
    """What to ask of the workers, and what to make of their tokens."""
    served, n = target.served, body.n or 1
    card = served.card
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequestError(f"at most {MAX_CHOICES} choices a request; use /v1/jobs for more", param="prompt")
    whole = prompts
    prompts = [truncated(prompt, body, card, settings, asked_or_default(body)) for prompt in whole]
    check_prompts(prompts, card, settings, "prompt")
    scores_only = body.max_tokens == 0
    if scores_only and n > 1:
        raise InvalidRequestError("'max_tokens' 0 goes with 'n' 1", param="n")
    plan = reply_plan(
        body,
        target,
        settings,
        "completions",
        prompts,
        echo=_echo_texts(body, whole, prompts, served.codec),
        logprobs=top_of(body.logprobs, card, body.logprob_token_ids),
        scores_only=scores_only,
    )
    sampling = sampling_of(
        body,
        card,
        room_for(prompts, card, body.max_tokens, DEFAULT_MAX_TOKENS, clamp=settings.clamp_max_tokens),
        top_logprobs=top_of(body.logprobs, card) or None,
        prompt_logprobs=_prompt_logprobs(body, card, scores_only),
        logprobs_mode=settings.logprobs_mode,
        grammar=grammar_of_outputs(body.structured_outputs),
        codec=served.codec,
    )
    collect = collection_of(body, target, settings, len(prompts))
    return work_for(plan, target, sampling, "score" if scores_only else "generate", collect), plan


def asked_or_default(body: CompletionRequest) -> int:
    """Tokens that are to fit behind a prompt that is cut to the context."""
    return DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens


def _prompt_logprobs(body: CompletionRequest, card: ModelCard, scores_only: bool) -> int | None:
    """How many competitors of each prompt token the workers must tell: for `echo`, for vLLM's field, or for both."""
    echoed = top_of(body.logprobs, card) if body.echo else None
    wanted = [top_of(body.prompt_logprobs, card), echoed, 0 if scores_only else None]
    return max((k for k in wanted if k is not None), default=None)


def _echo_texts(
    body: CompletionRequest, whole: list[list[int]], prompts: list[list[int]], codec: TextCodec
) -> tuple[str, ...]:
    """What the client wrote; of ids, and of a prompt that was cut, the text that they stand for."""
    if not body.echo:
        return ()
    hides = body.skip_special_tokens is not False
    texts = zip(body.prompt, whole, prompts, strict=True)
    return tuple(
        asked if isinstance(asked, str) and len(ids) == len(all_) else codec.decode(ids, hides)
        for asked, all_, ids in texts
    )


def _echoed(plan: ReplyPlan, codec: TextCodec) -> bytes:
    """An echo without scores needs no worker."""
    events = [TokenEvent(plan.sequence(i), 0, 0, [], [], finish=Finish("length")) for i in range(plan.choices)]
    return whole_body(plan, codec, events)
