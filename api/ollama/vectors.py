"""POST /api/embed and the older /api/embeddings: vectors out of the served model's hidden states."""

import time
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from api.generation.target import target_of
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.ollama.body import ModelFields
from api.openai.chat import with_unused
from api.openai.embeddings import EmbeddingRequest, plan_embeddings, shown_vector, vectors_of, vectors_reply
from api.ring.ring import TheRing

router = APIRouter(tags=["ollama"], route_class=BodyRoute)


class EmbedRequest(ModelFields):
    """Request body of POST /api/embed."""

    input: str | list[str] = Field(max_length=2048)
    truncate: bool | None = Field(default=True, description="a longer text is cut to the context; false: 400")
    dimensions: int | None = Field(default=None, ge=1)

    def embedding(self, texts: list[str]) -> EmbeddingRequest:
        """The same request to /v1/embeddings."""
        cut = -1 if self.truncate is not False else None
        return EmbeddingRequest(input=texts, dimensions=self.dimensions, truncate_prompt_tokens=cut)


class EmbeddingsRequest(ModelFields):
    """Request body of POST /api/embeddings."""

    prompt: str | None = None


@router.post("/api/embed", summary="Embed texts (Ollama)", responses=error_responses(ok="A vector for each text"))
async def embed(body: EmbedRequest, request: Request, ring: TheRing) -> Response:
    """Vectors of length 1, in the order of the texts."""
    began = time.perf_counter()
    target = await target_of(ring, body, request)
    texts = [body.input] if isinstance(body.input, str) else body.input
    if not texts:
        return json_reply({"model": body.model, "embeddings": []})
    wanted = body.embedding(texts)
    sequences = await plan_embeddings(wanted, wanted.input, target, ring.settings)
    vectors = await vectors_of(target.ring, sequences)

    def answer() -> dict[str, Any]:
        return {
            "model": body.model,
            "embeddings": [shown_vector(wanted, vector) for vector in vectors],
            "total_duration": int(1e9 * (time.perf_counter() - began)),
            "load_duration": 0,
            "prompt_eval_count": sum(map(len, sequences.prompts)),
        }

    return with_unused(await vectors_reply(vectors, answer), body.unused(""))


@router.post("/api/embeddings", summary="Embed a text (Ollama's older)", responses=error_responses(ok="One vector"))
async def embeddings(body: EmbeddingsRequest, request: Request, ring: TheRing) -> Response:
    """The vector as the model has it, of any length."""
    target = await target_of(ring, body, request)
    if not body.prompt:
        return json_reply({"embedding": []})
    wanted = EmbeddingRequest(input=[body.prompt], normalize=False, truncate_prompt_tokens=-1)
    sequences = await plan_embeddings(wanted, wanted.input, target, ring.settings)
    (vector,) = await vectors_of(target.ring, sequences)
    return with_unused(json_reply({"embedding": shown_vector(wanted, vector)}), body.unused(""))
