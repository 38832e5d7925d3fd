"""POST /pooling, with vLLM's fields: the embeddings of texts in that endpoint's shape.

Of its tasks `embed` alone can be done: the models served here have no classifier and no head for single tokens.
"""

import time
import uuid
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from api.generation.plan import encoded, target_of
from api.generation.running import gather_all
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.http.fields import complaint
from api.openai.embeddings import EmbeddingRequest, plan_embeddings, shown_vector, written_vectors
from api.ring.ring import Ring, ring_of

router = APIRouter(tags=["openai"], route_class=BodyRoute)


class PoolingRequest(EmbeddingRequest):
    """POST /pooling."""

    off: ClassVar[dict[str, tuple[Any, ...]]] = {
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
    "/pooling",
    summary="Pool hidden states (vLLM)",
    response_class=Response,
    responses={
        200: {"description": "A vector for each input, in their order"},
        **error_responses(400, 404, 413, 429, 503, 504),
    },
)
async def pool(body: PoolingRequest, request: Request, ring: Annotated[Ring, Depends(ring_of)]) -> Response:
    """As /v1/embeddings, in vLLM's other shape."""
    target = await target_of(body, request, ring)
    codec = target.served.codec
    prompts = await encoded(codec, body.input, body.add_special_tokens is not False)
    work = plan_embeddings(body, prompts, target, ring.settings)
    gathered = await gather_all(ring, request, work)
    if gathered is None:
        return Response(status_code=499)
    vectors = [events[-1].embedding or b"" for events in gathered]
    tokens = sum(map(len, work.prompts))
    answer = {
        "id": f"pool-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model or work.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }

    def write() -> bytes:
        shown = [shown_vector(body, np.frombuffer(vector, "<f4")) for vector in vectors]
        data = [{"index": at, "object": "pooling", "data": each} for at, each in enumerate(shown)]
        return msgspec.json.encode({**answer, "data": data})

    return Response(await written_vectors(vectors, write), media_type="application/json")
