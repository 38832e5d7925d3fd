"""POST /v1/predict: named tensors in, named tensors out, of a network, or of a language model taken as one.

A network takes and gives what its version's signature says, and its recurrent state. What a language model takes is
`text` or `input_ids`; what it gives is `embedding` (the last position's hidden state, [B, H]) and the K most likely
next tokens, `next_token_ids` and `next_token_log_probs`, [B, K].
"""

import uuid
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from pydantic import Field, ValidationError, model_validator
from starlette.responses import Response

from api.callers.fair_pool import aside
from api.generation.logprobs import in_parts
from api.generation.networks import Format, described, manifest_of, question
from api.generation.networks import answer as answer_of
from api.generation.plan import check_prompts, encoded, plain_sequences, room_for
from api.generation.running import gather_all
from api.generation.sampling import StrictId
from api.generation.target import Target, target_of
from api.http.bodies import LONG_BYTES, BodyRoute
from api.http.errors import error_responses, from_validation
from api.http.fields import RequestModel, complaint
from api.openai.embeddings import vectors_of, vectors_reply
from api.ring.ring import Ring, TheRing
from api.rl.act import PolicyFields
from shared.errors import InvalidRequestError
from shared.networks.spec import NetworkSpec
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


class LanguagePrediction(RequestModel):
    """Fields of PredictRequest as a language model takes them."""

    inputs: Inputs
    outputs: list[Output] = Field(default=["next_token_ids", "next_token_log_probs"], min_length=1)


class PredictRequest(PolicyFields):
    """Request body of POST /v1/predict."""

    inputs: dict[str, Any] = Field(
        description="of a language model `text` or `input_ids`; of a network its inputs by name, each nested lists, or "
        "`{dtype, shape, data}` with lists or base64, a row first"
    )
    outputs: list[str] | None = Field(
        default=None, min_length=1, max_length=64, description="names; default: next tokens, or all of a network"
    )
    top_k: int | None = Field(default=None, ge=1, le=20, description="K of the next tokens (10)")
    encoding_format: Format | None = Field(
        default=None, description="of a network's outputs: float, the default, or base64"
    )

    def checked(self) -> LanguagePrediction:
        """The request to a language model; InvalidRequestError if it does not suit one."""
        if self.encoding_format not in (None, "float"):
            raise InvalidRequestError("base64 is for networks", param="encoding_format")
        fields = {"inputs": self.inputs} | ({} if self.outputs is None else {"outputs": self.outputs})
        try:
            return LanguagePrediction.model_validate(fields)
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False)) from None


@router.post(
    "/v1/predict",
    summary="Run a model as a plain network",
    responses=error_responses(ok="Tensors by name: `dtype`, `shape` and `data`"),
)
async def predict(body: PredictRequest, request: Request, ring: TheRing) -> Response:
    """Inputs and outputs by name."""
    target = await target_of(ring, body, request, networks=True)
    ring = target.ring
    if target.network is not None:
        return await _by_network(body, request, ring, target, target.network)
    long = len(await request.body()) > LONG_BYTES
    return await _by_language_model(body, await aside(body.checked) if long else body.checked(), ring, target)


async def _by_network(
    body: PredictRequest, request: Request, ring: Ring, target: Target, network: NetworkSpec
) -> Response:
    if body.top_k is not None:
        raise InvalidRequestError("a network has no next tokens", param="top_k")
    known = [*network.outputs, *network.state]
    wanted = body.outputs or known
    for at, name in enumerate(wanted):
        if name not in known:
            raise InvalidRequestError(
                f"the network gives no {name[:80]!r}; it gives {', '.join(known)}", param=f"outputs[{at}]"
            )
    outputs = await answer_of(ring, target, "predict", await question(request, network, body.inputs, "inputs"))

    def answer() -> dict[str, Any]:
        return {
            "id": f"predict-{uuid.uuid4().hex}",
            "object": "prediction",
            "model": body.model or manifest_of(target).name,
            "policy_version": manifest_of(target).id,
            "outputs": {name: described(outputs[name], body.encoding_format or "float") for name in wanted},
        }

    return await vectors_reply(list(outputs.values()), answer)


async def _by_language_model(body: PredictRequest, asked: LanguagePrediction, ring: Ring, target: Target) -> Response:
    card, settings = target.served.card, ring.settings
    prompts = asked.inputs.input_ids or await encoded(target.served.codec, asked.inputs.text or ())
    check_prompts(prompts, card, settings, "inputs")
    outputs: dict[str, Any] = {}
    vectors: list[npt.NDArray[np.float32]] = []
    if "embedding" in asked.outputs:
        pooled = plain_sequences("predict", target, settings, prompts, kind="embed", pooling="last")
        vectors = await vectors_of(ring, pooled)
    if {"next_token_ids", "next_token_log_probs"} & set(asked.outputs):
        room = room_for(prompts, card, 1, 1)
        greedy = SamplingParams(max_tokens=room, seed=0, temperature=0.0, top_logprobs=body.top_k or 10)
        gathered = await gather_all(ring, plain_sequences("predict", target, settings, prompts, greedy))
        tops = [next(event.top_logprobs[0] for event in events if event.top_logprobs) for events in gathered]
        count = len(tops[0])
        outputs["next_token_ids"] = _tensor("int64", count, ([each.token for each in top] for top in tops))
        outputs["next_token_log_probs"] = _tensor("float32", count, ([each.logprob for each in top] for top in tops))

    def answer() -> dict[str, Any]:
        if vectors:
            outputs["embedding"] = _tensor("float32", len(vectors[0]), (vector.tolist() for vector in vectors))
        return {
            "id": f"predict-{uuid.uuid4().hex}",
            "object": "prediction",
            "model": body.model or card.name,
            "outputs": {name: outputs[name] for name in asked.outputs},
        }

    return await vectors_reply(vectors, answer)


def _tensor(dtype: str, width: int, rows: Iterable[list[Any]]) -> dict[str, Any]:
    data = in_parts(rows)
    return {"dtype": dtype, "shape": [len(data), width], "data": data}
