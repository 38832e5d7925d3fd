"""POST /v1/predict: named tensors in, named tensors out, of a served model taken as a plain network.

What a language model takes is `text` or `input_ids`; what it gives is `embedding` (the last position's hidden state,
[B, H]) and the K most likely next tokens, `next_token_ids` and `next_token_log_probs`, [B, K].
"""

import uuid
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from api.generation.plan import encoded, target_of
from api.generation.running import gather_all
from api.generation.sampling import check_prompts, deadline, room_for
from api.generation.target import Target
from api.generation.work import Work
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.http.fields import RequestModel, complaint
from api.ring.ring import Ring, ring_of
from shared.sequences import AdapterPolicy, SamplingParams

router = APIRouter(tags=["rl"], route_class=BodyRoute)

Output = Literal["embedding", "next_token_ids", "next_token_log_probs"]


class Inputs(RequestModel):
    """A language model's signature: one of these."""

    text: list[str] | None = Field(default=None, min_length=1, max_length=256)
    input_ids: list[list[Annotated[int, Field(strict=True, ge=0)]]] | None = Field(
        default=None, min_length=1, max_length=256, description="rows may differ in length; there is no padding"
    )

    @model_validator(mode="after")
    def _one(self) -> "Inputs":
        if (self.text is None) == (self.input_ids is None):
            raise complaint("", "exactly one of 'text' and 'input_ids'")
        return self


class PredictRequest(RequestModel):
    """POST /v1/predict."""

    inputs: Inputs
    model_id: str | None = Field(default=None, description="a served model, an adapter or a version of it")
    model: str | None = Field(default=None, description="the same as `model_id`")
    outputs: list[Output] = Field(default=["next_token_ids", "next_token_log_probs"], min_length=1)
    top_k: int = Field(default=10, ge=1, le=20, description="K of the next tokens")
    user: str | None = None
    adapter: str | None = None
    lora_adapter: str | None = None
    adapter_policy: AdapterPolicy | None = None

    @model_validator(mode="after")
    def _model(self) -> "PredictRequest":
        if self.model and self.model_id and self.model != self.model_id:
            raise complaint("model_id", "'model' and 'model_id' name different models")
        self.model = self.model or self.model_id
        return self


@router.post(
    "/v1/predict",
    summary="Run a model as a plain network",
    responses={
        200: {"description": "Tensors by name: `dtype`, `shape` and `data`"},
        **error_responses(400, 404, 413, 429, 503, 504),
    },
)
async def predict(body: PredictRequest, request: Request, ring: Annotated[Ring, Depends(ring_of)]) -> Response:
    """Inputs and outputs by name."""
    target = await target_of(body, request, ring)
    codec = target.served.codec
    prompts = body.inputs.input_ids or await encoded(codec, body.inputs.text or ())
    check_prompts(prompts, target.served.card, ring.settings, "inputs")
    outputs: dict[str, Any] = {}
    if "embedding" in body.outputs:
        outputs["embedding"] = await _embedding(request, ring, target, prompts)
    if {"next_token_ids", "next_token_log_probs"} & set(body.outputs):
        outputs |= await _next_tokens(request, ring, target, prompts, body.top_k)
    if None in outputs.values():
        return Response(status_code=499)
    answer = {
        "id": f"predict-{uuid.uuid4().hex}",
        "object": "prediction",
        "model": body.model or target.served.card.name,
        "outputs": {name: outputs[name] for name in body.outputs},
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _embedding(request: Request, ring: Ring, target: Target, prompts: list[list[int]]) -> dict[str, Any] | None:
    work = _work(ring, target, prompts, SamplingParams(max_tokens=0, seed=0), kind="embed", pooling="last")
    gathered = await gather_all(ring, request, work)
    if gathered is None:
        return None
    vectors = [np.frombuffer(events[-1].embedding or b"", "<f4") for events in gathered]
    return _tensor("float32", [vector.tolist() for vector in vectors])


async def _next_tokens(
    request: Request, ring: Ring, target: Target, prompts: list[list[int]], k: int
) -> dict[str, dict[str, Any] | None]:
    max_tokens = room_for(prompts, target.served.card, 1, 1)
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, top_logprobs=k)
    gathered = await gather_all(ring, request, _work(ring, target, prompts, sampling))
    if gathered is None:
        return {"next_token_ids": None}
    tops = [next(event.top_logprobs[0] for event in events if event.top_logprobs) for events in gathered]
    return {
        "next_token_ids": _tensor("int64", [[each.token for each in top] for top in tops]),
        "next_token_log_probs": _tensor("float32", [[each.logprob for each in top] for top in tops]),
    }


def _work(ring: Ring, target: Target, prompts: list[list[int]], sampling: SamplingParams, **kind: Any) -> Work:
    return Work(
        id=f"predict-{uuid.uuid4().hex}",
        model=target.served.card.name,
        prompts=tuple(map(tuple, prompts)),
        sampling=sampling,
        adapter=target.adapter,
        adapter_policy=target.policy,
        deadline_ms=deadline(ring.settings),
        **kind,
    )


def _tensor(dtype: str, rows: list[list[Any]]) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [len(rows), len(rows[0])], "data": rows}
