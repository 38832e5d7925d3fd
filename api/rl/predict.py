"""POST /v1/predict: named tensors in, named tensors out, of a served model taken as a plain network.

What a language model takes is `text` or `input_ids`; what it gives is `embedding` (the last position's hidden state,
[B, H]) and the K most likely next tokens, `next_token_ids` and `next_token_log_probs`, [B, K].
"""

import uuid
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from api.generation.plan import UNSAMPLED, check_prompts, encoded, plain_work, room_for
from api.generation.running import gather_all
from api.generation.sampling import StrictId
from api.generation.target import target_of
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.http.fields import RequestModel, complaint
from api.openai.embeddings import vectors_of, vectors_reply
from api.ring.ring import TheRing
from api.rl.act import PolicyFields
from shared.sequences import SamplingParams

router = APIRouter(tags=["rl"], route_class=BodyRoute)

Output = Literal["embedding", "next_token_ids", "next_token_log_probs"]


class Inputs(RequestModel):
    """A language model's signature: one of these."""

    text: list[str] | None = Field(default=None, min_length=1, max_length=256)
    input_ids: list[list[StrictId]] | None = Field(
        default=None, min_length=1, max_length=256, description="rows may differ in length; there is no padding"
    )

    @model_validator(mode="after")
    def _one(self) -> "Inputs":
        if (self.text is None) == (self.input_ids is None):
            raise complaint("", "exactly one of 'text' and 'input_ids'")
        return self


class PredictRequest(PolicyFields):
    """POST /v1/predict."""

    inputs: Inputs
    outputs: list[Output] = Field(default=["next_token_ids", "next_token_log_probs"], min_length=1)
    top_k: int = Field(default=10, ge=1, le=20, description="K of the next tokens")


@router.post(
    "/v1/predict",
    summary="Run a model as a plain network",
    responses=error_responses(ok="Tensors by name: `dtype`, `shape` and `data`"),
)
async def predict(body: PredictRequest, request: Request, ring: TheRing) -> Response:
    """Inputs and outputs by name."""
    target = await target_of(ring, body, request)
    card, settings = target.served.card, ring.settings
    prompts = body.inputs.input_ids or await encoded(target.served.codec, body.inputs.text or ())
    check_prompts(prompts, card, settings, "inputs")
    outputs: dict[str, Any] = {}
    vectors: list[npt.NDArray[np.float32]] = []
    if "embedding" in body.outputs:
        work = plain_work("predict", target, settings, prompts, UNSAMPLED, kind="embed", pooling="last")
        vectors = await vectors_of(ring, work)
    if {"next_token_ids", "next_token_log_probs"} & set(body.outputs):
        room = room_for(prompts, card, 1, 1)
        greedy = SamplingParams(max_tokens=room, seed=0, temperature=0.0, top_logprobs=body.top_k)
        gathered = await gather_all(ring, plain_work("predict", target, settings, prompts, greedy))
        tops = [next(event.top_logprobs[0] for event in events if event.top_logprobs) for events in gathered]
        outputs["next_token_ids"] = _tensor("int64", [[each.token for each in top] for top in tops])
        outputs["next_token_log_probs"] = _tensor("float32", [[each.logprob for each in top] for top in tops])

    def answer() -> dict[str, Any]:
        if vectors:
            outputs["embedding"] = _tensor("float32", [vector.tolist() for vector in vectors])
        return {
            "id": f"predict-{uuid.uuid4().hex}",
            "object": "prediction",
            "model": body.model or card.name,
            "outputs": {name: outputs[name] for name in body.outputs},
        }

    return await vectors_reply(vectors, answer)


def _tensor(dtype: str, rows: list[list[Any]]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [len(rows), len(rows[0])], "data": rows}
