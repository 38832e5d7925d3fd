"""POST /score and /rerank, with vLLM's fields: how near texts are to each other, as the served model sees them.

A score is the cosine of two texts' embeddings, which is what vLLM gives for models that embed. The models served here
have no head that was trained to compare, so nothing is said about how well it ranks.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Depends, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from api.generation.plan import encoded, target_of
from api.generation.running import gather_all
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.http.fields import MAX_PROMPTS, Priority, RequestModel, Truncation, TruncationSide, complaint
from api.openai.embeddings import EmbeddingRequest, plan_embeddings
from api.ring.ring import Ring, ring_of
from shared.sequences import AdapterPolicy, Pooling

router = APIRouter(tags=["openai"], route_class=BodyRoute)
TheRing = Annotated[Ring, Depends(ring_of)]

Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS // 2)]
_ANSWERS = error_responses(400, 404, 413, 429, 503, 504)


class ComparedFields(RequestModel):
    """What both endpoints share."""

    off: ClassVar[dict[str, tuple[Any, ...]]] = {  # vLLM's, of models with a head
        "use_activation": (True, False),
        "mm_processor_kwargs": (),
        "padding": ("do_not_pad",),
        "cache_salt": (),
        "chat_template": (),
        "instruction": (),
    }

    model: str | None = Field(default=None, description="a served model or an adapter on one")
    user: str | None = Field(default=None, description="a session: it stays with its choice of an adapter split")
    truncate_prompt_tokens: Truncation = None
    truncation_side: TruncationSide = None
    priority: Priority = None
    pooling: Pooling | None = Field(default="mean", description="which hidden states make the embedding")
    adapter: str | None = None
    lora_adapter: str | None = None
    adapter_policy: AdapterPolicy | None = None


class ScoreRequest(ComparedFields):
    """POST /score: one text with each of several, or pairs of two lists of equal length."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = Field(default=None, description="the same as `text_1`")
    documents: Texts | None = Field(default=None, description="the same as `text_2`")
    items: Texts | None = Field(default=None, description="the same as `text_2`")
    data_1: Texts | None = Field(default=None, description="the same as `text_1`")
    data_2: Texts | None = Field(default=None, description="the same as `text_2`")

    @model_validator(mode="after")
    def _possible(self) -> "ScoreRequest":
        for side, names in (("text_1", _FIRST), ("text_2", _SECOND)):
            given = [name for name in names if getattr(self, name) is not None]
            if len(given) != 1:
                raise complaint(side, f"give exactly one of {', '.join(names)}")
        first, second = self.sides()
        if len(first) not in (1, len(second)):
            raise complaint("text_1", f"{len(first)} texts with {len(second)}: one with each, or as many as those")
        return self

    def sides(self) -> tuple[list[str], list[str]]:
        """Both lists of texts."""
        return _listed(self, _FIRST), _listed(self, _SECOND)


_FIRST = ("text_1", "queries", "data_1")
_SECOND = ("text_2", "documents", "items", "data_2")


def _listed(body: ScoreRequest, names: Sequence[str]) -> list[str]:
    found: Any = next(value for name in names if (value := getattr(body, name)) is not None)
    return [found] if isinstance(found, str) else found


class RerankRequest(ComparedFields):
    """POST /rerank."""

    query: str
    documents: list[str] = Field(min_length=1, max_length=MAX_PROMPTS // 2)
    top_n: int | None = Field(default=0, ge=0, description="so many of the nearest; 0: all")
    return_documents: bool | None = Field(default=True, description="false: without their texts")


@router.post("/score", summary="Compare texts (vLLM)", response_class=Response, responses=_ANSWERS)
@router.post("/v1/score", include_in_schema=False)
async def score(body: ScoreRequest, request: Request, ring: TheRing) -> Response:
    """The cosine of each pair."""
    first, second = body.sides()
    found = await _embedded(body, [*first, *second], request, ring)
    if found is None:
        return Response(status_code=499)
    model, vectors, tokens = found
    left = vectors[: len(first)]
    cosines = np.sum(left * vectors[len(first) :], axis=1)  # one row goes with each
    answer = {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [{"index": at, "object": "score", "score": float(each)} for at, each in enumerate(cosines)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post("/rerank", summary="Order texts by nearness (vLLM)", response_class=Response, responses=_ANSWERS)
@router.post("/v1/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(body: RerankRequest, request: Request, ring: TheRing) -> Response:
    """Documents, the nearest to the query first."""
    found = await _embedded(body, [body.query, *body.documents], request, ring)
    if found is None:
        return Response(status_code=499)
    model, vectors, tokens = found
    cosines = vectors[1:] @ vectors[0]
    order = sorted(range(len(body.documents)), key=lambda at: -cosines[at])[: body.top_n or None]
    answer = {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": [
            {
                "index": at,
                **({"document": {"text": body.documents[at]}} if body.return_documents is not False else {}),
                "relevance_score": float(cosines[at]),
            }
            for at in order
        ],
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _embedded(
    body: ComparedFields, texts: list[str], request: Request, ring: Ring
) -> tuple[str, npt.NDArray[np.float32], int] | None:
    """Model, embeddings of length 1 (a row each), and the number of tokens; None when the client has left."""
    target = await target_of(body, request, ring)
    prompts = await encoded(target.served.codec, texts)
    cut = {"truncate_prompt_tokens": body.truncate_prompt_tokens, "truncation_side": body.truncation_side}
    asked = EmbeddingRequest.model_validate({"input": [0], "pooling": body.pooling, **cut})
    work = plan_embeddings(asked, prompts, target, ring.settings)
    gathered = await gather_all(ring, request, work)
    if gathered is None:
        return None
    vectors = np.stack([np.frombuffer(events[-1].embedding or b"", "<f4") for events in gathered])
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return body.model or work.model, unit, sum(map(len, work.prompts))
