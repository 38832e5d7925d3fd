"""The split of an adapter over HTTP: begin one, look at it, end it.

While it runs, requests for the adapter by its name alone go to its versions by their shares, as
`api/ring/split_choices.py` says; rewards move the shares, and the verdict moves `latest`.
"""

import math
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Path as PathParameter
from pydantic import Field
from starlette.responses import Response

from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.fields import RequestModel
from api.ring.ring import Ring, TheRing
from shared.adapters import NAME, AdapterRef, check_language
from shared.errors import InvalidRequestError, NotFoundError
from shared.redis.adapters.splits import SplitState
from shared.splits import LEAST_REWARDS, MOST_REWARDS, MOST_VERSIONS, Split

LEAST_SHARE = 1e-6  # that a version can begin with

router = APIRouter(tags=["adapters"], route_class=BodyRoute)
Name = Annotated[str, PathParameter(pattern=f"^{NAME}$")]


class SplitBody(RequestModel):
    """Request body of PUT /v1/adapters/{name}/split."""

    split: str = Field(
        max_length=2048,
        description="versions of this adapter with the shares that they begin with, as in `policy@3:0.9,policy@4:0.1`; "
        "one of them is the latest",
    )
    auto: bool = Field(default=True, description="rewards move the shares; false: they stay")
    floor: float = Field(default=0.01, ge=0, le=0.5, description="share that every version keeps until the verdict")
    verdict_after: int = Field(
        default=400, ge=10, le=MOST_REWARDS, description="rewards of all versions, 10 each or more"
    )
    confidence: float = Field(
        default=0.95, ge=0.5, lt=1, description="that another version is better, for it to become the latest"
    )


@router.put(
    "/v1/adapters/{name}/split",
    summary="Split an adapter's requests",
    response_class=Response,
    responses=error_responses(400, 404, 409),
)
async def set_split(name: Name, body: SplitBody, ring: TheRing) -> Response:
    """Requests for `name` alone go to several versions; a split of the same versions goes on under the new terms."""
    summary = await ring.adapters.summary(name)
    versions, weights = _read(name, body)
    if not summary.latest or summary.latest not in versions:
        raise InvalidRequestError(
            f"a split compares with the latest version, '{name}@{summary.latest}': name it", param="split"
        )
    for version in versions:
        resolved = await ring.adapters.resolve(f"{name}@{version}")
        check_language(resolved.manifest)  # requests to networks are not split
    split = Split(
        versions=versions,
        weights=weights,
        latest=summary.latest,
        auto=body.auto,
        floor=body.floor,
        verdict_after=body.verdict_after,
        confidence=body.confidence,
        tenant=summary.tenant,
    )
    await ring.splits.stored.begin(name, split)
    ring.splits.forget(name)
    return json_reply(shown(name, await _there(ring, name)))


@router.get(
    "/v1/adapters/{name}/split",
    summary="Look at a split",
    response_class=Response,
    responses=error_responses(404),
)
async def see_split(name: Name, ring: TheRing) -> Response:
    """Returns each version's rewards and share, and the verdict. A split that has ended can still be read."""
    await ring.adapters.check_change(name)
    return json_reply(shown(name, await _there(ring, name)))


@router.delete("/v1/adapters/{name}/split", summary="End a split", responses=error_responses(404))
async def end_split(name: Name, ring: TheRing) -> dict[str, Any]:
    """End it without a verdict: `name` is the latest version again; what its versions have earned is forgotten."""
    if not await ring.splits.stored.remove(name):
        raise _unknown(name)
    ring.splits.forget(name)
    return {"id": name, "object": "adapter.split", "deleted": True}


def _read(name: str, body: SplitBody) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Versions, and the shares that they begin with."""
    try:
        choices = AdapterRef.parse(body.split).choices
    except InvalidRequestError as error:
        error.param = "split"
        raise
    if not 2 <= len(choices) <= MOST_VERSIONS:
        raise InvalidRequestError(f"a split has 2 to {MOST_VERSIONS} versions, this one {len(choices)}", param="split")
    for choice in choices:
        if choice.name != name or choice.follows:
            raise InvalidRequestError(f"'{choice}' is no version of '{name}', as '{name}@3' would be", param="split")
    if body.floor * len(choices) >= 1:
        raise InvalidRequestError(f"a floor of {body.floor} leaves nothing to share", param="floor")
    if body.verdict_after < LEAST_REWARDS * len(choices):
        raise InvalidRequestError(
            f"a verdict over {len(choices)} versions takes {LEAST_REWARDS * len(choices)} rewards or more, "
            f"not {body.verdict_after}",
            param="verdict_after",
        )
    choices = tuple(sorted(choices, key=lambda choice: choice.version))
    total = math.fsum(choice.weight for choice in choices)
    weights = tuple(choice.weight / total for choice in choices)
    for choice, weight in zip(choices, weights, strict=True):
        if weight < LEAST_SHARE:
            raise InvalidRequestError(
                f"'{choice}' begins with a share of {weight:.3g}; {LEAST_SHARE:g} is the least", param="split"
            )
    return tuple(choice.version for choice in choices), weights


async def _there(ring: Ring, name: str) -> SplitState:
    state = await ring.splits.read(name)
    if state is None:
        raise _unknown(name)
    return state


def _unknown(name: str) -> NotFoundError:
    return NotFoundError(f"adapter {name!r} has no split")


def shown(name: str, state: SplitState) -> dict[str, Any]:
    """A split as the api returns it."""
    split, verdict = state.split, state.verdict
    shares = state.shares
    return {
        "id": state.id,
        "object": "adapter.split",
        "adapter": name,
        "state": "running" if not state.over else "decided" if verdict is not None else "over",
        "over": state.over or None,
        "auto": split.auto,
        "floor": split.floor,
        "verdict_after": split.verdict_after,
        "confidence": split.confidence,
        "latest": state.latest,
        "latest_at_start": split.latest,
        "started_ms": state.started_ms,
        "rewards": state.counted,
        "versions": [
            {
                "id": f"{name}@{version}",
                "share": shares[version],
                "rewards": state.earned[version].count,
                "mean_reward": state.earned[version].mean if state.earned[version].count else None,
            }
            for version in split.versions
        ],
        "verdict": None
        if verdict is None
        else {
            "winner": f"{name}@{verdict.winner}",
            "outcome": verdict.outcome,
            "detail": verdict.detail,
            "at_ms": verdict.at_ms,
        },
    }
