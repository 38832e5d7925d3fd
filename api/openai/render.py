"""POST /v1/chat/completions/render: the token ids that a chat comes to, and nothing generated (vLLM).

The answer is a body for POST /inference/v1/generate.
"""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.generation.plan import plan
from api.generation.target import target_of
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.openai.bodies import ChatCompletionRequest
from api.openai.chat import in_words, prepare, unused_hints, with_unused
from api.ring.ring import TheRing
from shared.errors import UnsupportedParameterError

router = APIRouter(tags=["openai"], route_class=BodyRoute)

_SAMPLED = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "include_stop_str_in_output",
    "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words",
)  # fmt: skip


@router.post(
    "/v1/chat/completions/render",
    summary="Render a chat (vLLM)",
    response_class=Response,
    responses=error_responses(
        400, 404, 413, 503, ok="Token ids and sampling parameters, as /inference/v1/generate takes them"
    ),
)
async def render_chat(body: ChatCompletionRequest, request: Request, ring: TheRing) -> Response:
    """The whole of a request's checks, without a worker."""
    target = await target_of(ring, body, request)
    ring = target.ring
    codec, card = target.served.codec, target.served.card
    prepared = await prepare(codec, in_words(body, card), ring.settings)
    if prepared.grammar:
        raise UnsupportedParameterError(
            "a constrained answer cannot be rendered: ask for it as it is", param=prepared.grammar_param
        )
    sequences = (await plan(ring, body, target, prepared)).sequences
    given = body.model_dump(include=body.model_fields_set & set(_SAMPLED), exclude_none=True)
    sampling: dict[str, Any] = {**given, "max_tokens": sequences.template.sampling.max_tokens}
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    reply = json_reply(
        {
            "request_id": body.request_id or sequences.id,
            "model": body.model or sequences.template.model,
            "token_ids": sequences.prompts[0],
            "sampling_params": sampling,
            "stream": bool(body.stream),
        }
    )
    return with_unused(reply, unused_hints(body, codec, card))
