"""POST /v1/embeddings: one vector for each input, out of the served model's hidden states."""

import base64
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from api.generation.plan import encoded, target_of
from api.generation.running import gather_all
from api.generation.sampling import check_prompts, deadline, truncated
from api.generation.target import Target
from api.generation.work import Work
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.http.fields import Priority, Prompts, RequestModel, Truncation, TruncationSide
from api.ring.ring import Ring, ring_of
from api.ring.room import aside
from shared.errors import InvalidRequestError
from shared.process.settings import ApiSettings
from shared.sequences import AdapterPolicy, Pooling, SamplingParams

router = APIRouter(tags=["openai"], route_class=BodyRoute)

LARGE_VECTOR_BYTES = 1 << 18  # of all embeddings: to write their numbers takes some 10 ms from here on


class EmbeddingRequest(RequestModel):
    """POST /v1/embeddings."""

    input: Prompts
    model: str | None = Field(default=None, description="a served model or an adapter on one")
    encoding_format: Literal["float", "base64"] | None = Field(default="float", description="base64: of fp32 LE")
    dimensions: int | None = Field(
        default=None, ge=1, description="the first so many, normalised again: for models trained so (Matryoshka)"
    )
    user: str | None = Field(default=None, description="a session: it stays with its choice of an adapter split")
    # vLLM's
    truncate_prompt_tokens: Truncation = None
    truncation_side: TruncationSide = None
    priority: Priority = None
    normalize: bool | None = Field(default=True, description="to length 1")
    add_special_tokens: bool | None = True
    # ours
    pooling: Pooling | None = Field(default="mean", description="mean of all positions, the last one, or the first")
    adapter: str | None = Field(default=None, description="an adapter or a version of it")
    lora_adapter: str | None = Field(default=None, description="the same as `adapter`")
    adapter_policy: AdapterPolicy | None = None


@router.post(
    "/v1/embeddings",
    summary="Embed texts",
    responses={
        200: {"description": "A list of embeddings, in the order of the inputs"},
        **error_responses(400, 404, 413, 429, 503, 504),
    },
)
async def create_embeddings(
    body: EmbeddingRequest, request: Request, ring: Annotated[Ring, Depends(ring_of)]
) -> Response:
    """OpenAI's embeddings, as sequences in the same queue as everything else."""
    target = await target_of(body, request, ring)
    codec = target.served.codec
    prompts = await encoded(codec, body.input, body.add_special_tokens is not False)
    work = plan_embeddings(body, prompts, target, ring.settings)
    gathered = await gather_all(ring, request, work)
    if gathered is None:
        return Response(status_code=499)
    vectors = [events[-1].embedding or b"" for events in gathered]
    write = partial(embeddings_body, body, work, vectors)
    return Response(await written_vectors(vectors, write), media_type="application/json")


def plan_embeddings(body: EmbeddingRequest, prompts: list[list[int]], target: Target, settings: ApiSettings) -> Work:
    """What to ask of the workers."""
    card = target.served.card
    prompts = [truncated(prompt, body, card, settings, 0) for prompt in prompts]
    check_prompts(prompts, card, settings, "input")
    return Work(
        id=f"embd-{uuid.uuid4().hex}",
        model=card.name,
        prompts=tuple(map(tuple, prompts)),
        sampling=SamplingParams(max_tokens=0, seed=0),
        kind="embed",
        adapter=target.adapter,
        adapter_policy=target.policy,
        deadline_ms=deadline(settings),
        pooling=body.pooling or "mean",
    )


async def written_vectors(vectors: Sequence[bytes], write: Callable[[], bytes]) -> bytes:
    """What `write` makes of these vectors; for many numbers beside the event loop."""
    return await aside(write) if sum(map(len, vectors)) > LARGE_VECTOR_BYTES else write()


def embeddings_body(body: EmbeddingRequest, work: Work, vectors: list[bytes]) -> bytes:
    """JSON of the reply; `vectors` are the workers', fp32 and not normalised."""
    shown = [shown_vector(body, np.frombuffer(vector, "<f4")) for vector in vectors]
    tokens = sum(map(len, work.prompts))
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(shown)],
            "model": body.model or work.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def shown_vector(body: EmbeddingRequest, vector: npt.NDArray[np.float32]) -> str | list[float]:
    """One embedding as the request wants it."""
    if body.dimensions is not None:
        if body.dimensions > len(vector):
            raise InvalidRequestError(f"the model's embeddings have {len(vector)} dimensions", param="dimensions")
        vector = vector[: body.dimensions]
    if body.normalize is not False:
        length = np.linalg.norm(vector)
        vector = vector / length if length > 0 else vector
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    shown: list[float] = vector.tolist()
    return shown
