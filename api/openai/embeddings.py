"""POST /v1/embeddings and vLLM's /pooling: one vector for each input, out of the served model's hidden states.

Of pooling's tasks `embed` alone can be done: the models served here have no classifier and no head for single tokens.
"""

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from api.callers.fair_pool import aside
from api.generation.logprobs import in_parts
from api.generation.plan import check_prompts, encoded, plain_sequences, truncated
from api.generation.running import gather_all
from api.generation.sampling import PromptFields
from api.generation.sequences import Sequences
from api.generation.target import Target, target_of
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.fields import Off, Prompts, complaint
from api.ring.ring import Ring, TheRing
from shared.errors import InvalidRequestError
from shared.process.api_settings import ApiSettings
from shared.sequences import Pooling

router = APIRouter(tags=["openai"], route_class=BodyRoute)

LARGE_VECTOR_BYTES = 1 << 18  # of all vectors: to write their numbers takes some 10 ms from here on


class EmbeddingFields(PromptFields):
    """Fields that all endpoints share which embed texts."""

    pooling: Pooling | None = Field(default="mean", description="mean of all positions, the last one, or the first")


class EmbeddingRequest(EmbeddingFields):
    """Request body of POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = Field(default="float", description="base64: of fp32 LE")
    dimensions: int | None = Field(
        default=None, ge=1, description="the first so many, normalised again: for models trained so (Matryoshka)"
    )
    normalize: bool | None = Field(default=True, description="to length 1 (vLLM's)")
    add_special_tokens: bool | None = True


class PoolingRequest(EmbeddingRequest):
    """Body of vLLM's POST /pooling."""

    off: ClassVar[Off] = {
        "messages": (),
        "data": (),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "mm_processor_kwargs": (),
        "padding": ("do_not_pad",),
        "cache_salt": (),
    }

    task: str | None = Field(default=None, description="embed")
    use_activation: bool | None = Field(default=None, description="vLLM's name of `normalize`")

    @model_validator(mode="after")
    def _possible(self) -> "PoolingRequest":
        if self.task not in (None, "embed"):
            reason = f"'{self.task}' needs a head that the models served here do not have: 'embed' alone"
            raise complaint("task", reason, unsupported=True)
        if self.use_activation is not None:
            self.normalize = self.use_activation
        return self


@router.post(
    "/v1/embeddings",
    summary="Embed texts",
    responses=error_responses(ok="A list of embeddings, in the order of the inputs"),
)
async def create_embeddings(body: EmbeddingRequest, request: Request, ring: TheRing) -> Response:
    """OpenAI's embeddings, as sequences in the same queue as everything else."""
    target = await target_of(ring, body, request)
    sequences = await plan_embeddings(body, body.input, target, ring.settings)
    vectors = await vectors_of(target.ring, sequences)
    model, prompts = sequences.template.model, sequences.prompts
    return await vectors_reply(vectors, partial(embeddings_answer, body, model, prompts, vectors))


@router.post(
    "/pooling",
    summary="Pool hidden states (vLLM)",
    response_class=Response,
    responses=error_responses(ok="A vector for each input, in their order"),
)
async def pool(body: PoolingRequest, request: Request, ring: TheRing) -> Response:
    """As /v1/embeddings, in vLLM's other shape."""
    target = await target_of(ring, body, request)
    sequences = await plan_embeddings(body, body.input, target, ring.settings)
    vectors = await vectors_of(target.ring, sequences)

    def answer() -> dict[str, Any]:
        shown = in_parts(shown_vector(body, vector) for vector in vectors)
        return {
            "id": f"pool-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model or sequences.template.model,
            "data": [{"index": at, "object": "pooling", "data": vector} for at, vector in enumerate(shown)],
            "usage": prompt_usage(sequences.prompts),
        }

    return await vectors_reply(vectors, answer)


async def plan_embeddings(
    body: EmbeddingFields, texts: Sequence[str | list[int]], target: Target, settings: ApiSettings
) -> Sequences:
    card = target.served.card
    special = not isinstance(body, EmbeddingRequest) or body.add_special_tokens is not False
    prompts = truncated(await encoded(target.served.codec, texts, special), body, card, settings, 0)
    check_prompts(prompts, card, settings, "input")
    pooling, cache = body.pooling or "mean", body.cache is not False
    return plain_sequences("embd", target, settings, prompts, kind="embed", pooling=pooling, cache=cache)


async def vectors_of(ring: Ring, sequences: Sequences) -> list[npt.NDArray[np.float32]]:
    """The embeddings of the prompts as the workers compute them: not normalised."""
    return [np.frombuffer(events[-1].embedding or b"", "<f4") for events in await gather_all(ring, sequences)]


async def vectors_reply(vectors: Sequence[npt.NDArray[np.float32]], answer: Callable[[], Any]) -> Response:
    """`answer()`, which shows these vectors, as JSON; many numbers are written off the event loop."""
    if sum(vector.nbytes for vector in vectors) <= LARGE_VECTOR_BYTES:
        return json_reply(answer())
    return await aside(lambda: json_reply(answer()))


def prompt_usage(prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    """The counts of an answer for which nothing was generated."""
    tokens = sum(map(len, prompts))
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def embeddings_answer(
    body: EmbeddingRequest, model: str, prompts: Sequence[Sequence[int]], vectors: Sequence[npt.NDArray[np.float32]]
) -> dict[str, Any]:
    """The reply of POST /v1/embeddings, before it is JSON."""
    shown = in_parts(shown_vector(body, vector) for vector in vectors)
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(shown)],
        "model": body.model or model,
        "usage": prompt_usage(prompts),
    }


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
