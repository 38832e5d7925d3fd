"""POST /score and /rerank, with vLLM's fields: how near texts are to each other, as the served model sees them.

A score is the cosine of two texts' embeddings, which is what vLLM gives for models that embed. The models served here
have no head that was trained to compare, so nothing is said about how well it ranks.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from api.generation.target import target_of
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.fields import MAX_PROMPTS, Off, complaint
from api.openai.embeddings import EmbeddingFields, plan_embeddings, prompt_usage, vectors_of
from api.ring.ring import Ring, TheRing

router = APIRouter(tags=["openai"], route_class=BodyRoute)

Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS // 2)]
_ANSWERS = error_responses()


class ComparedFields(EmbeddingFields):
    """Fields that both endpoints share."""

    off: ClassVar[Off] = {  # vLLM's, of models with a head
        "use_activation": (True, False),
        "mm_processor_kwargs": (),
        "padding": ("do_not_pad",),
        "cache_salt": (),
        "chat_template": (),
        "instruction": (),
    }


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
        """Both lists of texts, whichever fields have them."""
        return _listed(self, _FIRST), _listed(self, _SECOND)


_FIRST = ("text_1", "queries", "data_1")
_SECOND = ("text_2", "documents", "items", "data_2")


def _listed(body: ScoreRequest, names: Sequence[str]) -> list[str]:
    found: Any = next(value for name in names if (value := getattr(body, name)) is not None)
    return [found] if isinstance(found, str) else found


class RerankRequest(ComparedFields):
    """Body of POST /rerank, /v1/rerank and /v2/rerank."""

    query: str
    documents: list[str] = Field(min_length=1, max_length=MAX_PROMPTS // 2)
    top_n: int | None = Field(default=0, ge=0, description="so many of the nearest; 0: all")
    return_documents: bool | None = Field(default=True, description="false: without their texts")


@router.post("/score", summary="Compare texts (vLLM)", response_class=Response, responses=_ANSWERS)
@router.post("/v1/score", include_in_schema=False)
async def score(body: ScoreRequest, request: Request, ring: TheRing) -> Response:
    """The cosine of each pair."""
    first, second = body.sides()
    model, vectors, counts = await _embedded(body, [*first, *second], request, ring)
    left = vectors[: len(first)]
    cosines = np.sum(left * vectors[len(first) :], axis=1)  # one row goes with each
    return json_reply(
        {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [{"index": at, "object": "score", "score": float(each)} for at, each in enumerate(cosines)],
            "usage": counts,
        }
    )


@router.post("/rerank", summary="Order texts by nearness (vLLM)", response_class=Response, responses=_ANSWERS)
@router.post("/v1/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(body: RerankRequest, request: Request, ring: TheRing) -> Response:
    """Documents, the nearest to the query first."""
    model, vectors, counts = await _embedded(body, [body.query, *body.documents], request, ring)
    cosines = vectors[1:] @ vectors[0]
    order = sorted(range(len(body.documents)), key=lambda at: -cosines[at])[: body.top_n or None]
    shows = body.return_documents is not False
    results = [
        {
            "index": at,
            **({"document": {"text": body.documents[at]}} if shows else {}),
            "relevance_score": float(cosines[at]),
        }
        for at in order
    ]
    return json_reply({"id": f"rerank-{uuid.uuid4().hex}", "model": model, "usage": counts, "results": results})


async def _embedded(
    body: ComparedFields, texts: list[str], request: Request, ring: Ring
) -> tuple[str, npt.NDArray[np.float32], dict[str, int]]:
    """Model, embeddings of length 1 (a row each), and the counts of tokens."""
    target = await target_of(ring, body, request)
    sequences = await plan_embeddings(body, texts, target, ring.settings)
    vectors = np.stack(await vectors_of(target.ring, sequences))
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return body.model or sequences.template.model, unit, prompt_usage(sequences.prompts)
