"""POST /v1/completions: text or token ids in, text (and token ids) out."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.generation.plan import PreparedRequest, encoded, plan
from api.generation.structured import grammar_of_outputs
from api.generation.target import target_of
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.openai.bodies import CompletionRequest
from api.openai.replies import reply, whole_body
from api.ring.ring import TheRing
from shared.frames import Finish, TokenEvent
from shared.process.api_settings import ApiSettings
from shared.text.codec import TextCodec

router = APIRouter(tags=["openai"], route_class=BodyRoute)


@router.post(
    "/v1/completions",
    summary="Complete text",
    responses=error_responses(ok="A completion object, or server-sent chunks when `stream` is true"),
)
async def create_completion(body: CompletionRequest, request: Request, ring: TheRing) -> Response:
    """OpenAI's legacy completions with vLLM's extras: token ids in and out, prompt log-probabilities, n samples."""
    target = await target_of(ring, body, request, split=True)
    ring = target.ring
    codec = target.served.codec
    planned = await plan(ring, body, target, await prepare(codec, body, ring.settings))
    scored = planned.logprobs is not None or planned.prompt_logprobs is not None
    if planned.sequences.scores_only and not scored and not body.stream:  # an echo without scores needs no worker
        events = [TokenEvent(seq, 0, 0, [], [], finish=Finish("length")) for seq in planned.sequences.ids]
        return Response(whole_body(planned, codec, events), media_type="application/json")
    return await reply(ring, codec, planned, bool(body.stream))


async def prepare(codec: TextCodec, body: CompletionRequest, settings: ApiSettings) -> PreparedRequest:
    """The prompts as ids, and what only this endpoint knows of them."""
    return PreparedRequest(
        prompts=await encoded(codec, body.prompt, body.add_special_tokens is not False),
        max_tokens=body.max_tokens,
        default_tokens=settings.default_max_tokens,
        logprobs=body.logprobs,
        echo=body.prompt if body.echo else (),
        grammar=grammar_of_outputs(body.structured_outputs),
    )
