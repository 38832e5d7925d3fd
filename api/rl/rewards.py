"""POST /v1/rewards/score: what the reward registry says of texts, at once. For thousands use a job of kind score.

A job runner computes it in its pool of processes; nothing of the text runs in this process.
"""

import uuid
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import APIRouter, Depends
from pydantic import Field, model_validator
from starlette.responses import Response

from api.collection import scoring_spec
from api.errors import error_responses
from api.openai.fields import RequestModel, complaint
from api.openai.schemas import Off
from api.ring import Ring, ring_of
from shared.errors import InvalidRequestError, ServiceUnavailableError
from shared.redis import keys
from shared.redis.orders import Orders
from shared.rewards import needs_reference
from shared.trajectories import Reward, ScoreOrder

router = APIRouter(tags=["training"])
TheRing = Annotated[Ring, Depends(ring_of)]

MAX_TEXTS = 1024
MAX_WAIT_S = 60.0
_rewards = msgspec.json.Decoder(list[Reward])


class ScoreBody(RequestModel):
    """Texts and what to score them by."""

    off: ClassVar[Off] = {"model": ()}  # rewards are functions; no reward model is served

    completions: str | list[str] = Field(description="one text, or up to 1,024")
    references: Any = Field(default=None, description="what to compare with: a list, one for each of several texts")
    reward: str | dict[str, Any] | None = Field(default=None, description="a reward's name, or an object with options")
    scoring_function: str | dict[str, Any] | None = Field(default=None, description="the same as `reward`")

    @model_validator(mode="after")
    def _whole(self) -> "ScoreBody":
        if (self.reward is None) == (self.scoring_function is None):
            raise complaint("reward", "give exactly one of 'reward' and 'scoring_function'")
        if isinstance(self.completions, list):
            if not 1 <= len(self.completions) <= MAX_TEXTS:
                raise complaint("completions", f"1 to {MAX_TEXTS} texts; use /v1/jobs for more")
            several = isinstance(self.references, list) and len(self.references) == len(self.completions)
            if self.references is not None and not several:
                raise complaint("references", "a list with one reference for each of 'completions'")
        return self


@router.post(
    "/v1/rewards/score",
    summary="Score texts",
    response_class=Response,
    responses={200: {"description": "A score for each text"}, **error_responses(400, 413, 429, 503)},
)
async def score(body: ScoreBody, ring: TheRing) -> Response:
    """One score for each text; `error` says why there is none."""
    param = "reward" if body.reward is not None else "scoring_function"
    spec = scoring_spec(body.reward if body.reward is not None else body.scoring_function or "", param)
    texts = [body.completions] if isinstance(body.completions, str) else body.completions
    references = [body.references] if isinstance(body.completions, str) else body.references or [None] * len(texts)
    if needs_reference(spec) and (bare := [i for i, reference in enumerate(references) if reference is None]):
        raise InvalidRequestError(
            f"reward '{spec.name}' compares with a reference, and references[{bare[0]}] is not there",
            param="references",
        )
    order_id = f"score-{uuid.uuid4().hex}"
    orders = Orders(ring.redis, keys.score_orders(), kept=256)
    order = ScoreOrder(spec.name, spec.options, tuple(zip(texts, references, strict=True)))
    limit = min(MAX_WAIT_S, ring.settings.request_timeout_s)
    await orders.place(order_id, msgspec.json.encode(order), limit)
    found = await orders.answer(order_id, limit)
    if found is None:
        raise ServiceUnavailableError(f"no job runner has answered within {limit:.0f} s")
    rewards = _rewards.decode(found)
    values = [reward.value for reward in rewards if reward.value is not None]
    answer = {
        "object": "list",
        "reward": spec.name,
        "data": [
            {"object": "reward", "index": i, "score": r.value, "components": r.components, "error": r.error or None}
            for i, r in enumerate(rewards)
        ],
        "mean_score": sum(values) / len(values) if values else None,
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")
