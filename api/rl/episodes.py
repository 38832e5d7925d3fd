"""GET /v1/sessions: conversations of live traffic, each joined to one episode of turns.

The turns are those whose answers are stored (`--feedback-ttl-days`), under the same rules of consent: none of a key
with `feedback=no`, none of a request with `collect_trajectory`. A tenant sees its own.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from api.callers.caller import asker
from api.callers.fair_pool import aside
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.ring.ring import TheRing
from api.ring.stored_sessions import StoredSession, check_stored, stored_session
from shared.episodes import JoinedTurn
from shared.errors import NotFoundError
from shared.redis.kept.answer_store import StoredAnswer, answers_of, live_of
from shared.redis.kept.episode_store import episodes_of
from shared.signals import Calibration, Signal, chance_of

router = APIRouter(tags=["training"], route_class=BodyRoute)

SessionId = Annotated[str, Path(max_length=160)]


@router.get(
    "/v1/sessions",
    summary="List sessions",
    response_class=Response,
    responses={200: {"description": "Sessions, the last used first"}, **error_responses(400)},
)
async def listed(
    ring: TheRing,
    after: Annotated[str, Query(max_length=160, description="the `id` after which the page begins")] = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """The asker's conversations whose answers are stored."""
    check_stored(ring)
    found = await ring.episodes.list(episodes_of(asker().tenant), after=after, limit=limit + 1)
    data = [{"object": "session", **each._asdict()} for each in found[:limit]]
    return json_reply({"object": "list", "data": data, "has_more": len(found) > limit})


@router.get(
    "/v1/sessions/{session_id}",
    summary="One session, turn by turn",
    response_class=Response,
    responses={200: {"description": "The session with its turns"}, **error_responses(400, 404)},
)
async def one(
    session_id: SessionId,
    ring: TheRing,
    tokens: Annotated[bool, Query(description="with ids and log-probabilities as sampled")] = False,
    after: Annotated[str, Query(max_length=512, description="the turn's `name` after which the page begins")] = "",
    limit: Annotated[int, Query(ge=1, le=512)] = 100,
) -> Response:
    """The turns by time, each with the turn that it follows.

    `branch` says why a turn does not just follow: `again` (the same request as an earlier one), `rewritten` (another
    history under the same session, as after a compaction), `agent` (another system message, as of a sub-agent).
    """
    check_stored(ring)
    stored = await stored_session(ring, asker().tenant, session_id)
    there, turns = stored.ring, stored.turns
    names = [each.turn.name for each in turns]
    if after and after not in names:
        raise NotFoundError(f"session {session_id!r} has no turn {after[:200]!r}", param="after")
    start = names.index(after) + 1 if after else 0
    page = turns[start : start + limit]
    keeper = answers_of(asker().tenant)
    answers = [await there.answers.find(keeper, each.turn.name) for each in page] if tokens else [None] * len(page)

    def shown() -> bytes:
        data = [_shown(stored, each, answer) for each, answer in zip(page, answers, strict=True)]
        body = {"object": "session", "id": session_id, "count": len(turns), "turns": data}
        body |= {"has_more": start + limit < len(turns), "calibration": _calibration(stored)}
        return msgspec.json.encode(body)

    return Response(await aside(shown), media_type="application/json")


@router.delete(
    "/v1/sessions/{session_id}",
    summary="Delete a session",
    response_class=Response,
    responses={200: {"description": "What was deleted"}, **error_responses(400, 404)},
)
async def delete(session_id: SessionId, ring: TheRing) -> Response:
    """Deletes the session and its stored answers. What a trainer has learned from or received stays there."""
    check_stored(ring)
    there, turns, *_ = await stored_session(ring, asker().tenant, session_id)
    for each in turns:
        await there.answers.forget(answers_of(asker().tenant), each.turn.name)
    await there.episodes.forget(episodes_of(asker().tenant), session_id)
    return json_reply({"object": "session.deleted", "id": session_id, "turns": len(turns), "deleted": True})


def _calibration(stored: StoredSession) -> dict[str, Any]:
    chances, verdicts = stored.calibration
    return {name: {"content": round(chance, 4), "verdicts": verdicts.get(name, 0)} for name, chance in chances.items()}


def _signal(signal: Signal, calibration: Calibration) -> dict[str, Any]:
    chance = chance_of(signal, calibration)
    body: dict[str, Any] = {"kind": signal.kind, "value": chance.value, "confidence": chance.confidence}
    named = {"labels": signal.labels, "text": signal.text, "detail": signal.detail, "judge": signal.judge}
    return body | {name: value for name, value in named.items() if value}


def _shown(stored: StoredSession, each: JoinedTurn, answer: StoredAnswer | None) -> dict[str, Any]:
    turn, place, reward = each.turn, each.turn.place, stored.rewards.get(each.turn.name)
    body: dict[str, Any] = {
        "object": "session.turn",
        "name": turn.name,
        "follows": each.parent or None,
        "branch": each.branch or None,
        "created_ms": turn.created_ms,
        "model": turn.model,
        "policy": turn.policy,
        "versions": turn.versions,
        "user": place.user or None,
        "messages": [{"role": said.role, "content": said.text} for said in place.said],
        "text": turn.text,
        "finish_reason": turn.finish_reason,
        "signals": [_signal(signal, stored.calibration) for signal in stored.signals.get(turn.name, ())],
        "reward": None if reward is None else reward._asdict(),
        "usage": {"prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.completion_tokens},
    }
    return body if answer is None else body | _tokens_of(answer)


def _tokens_of(answer: StoredAnswer) -> dict[str, Sequence[Any]]:
    t = live_of(answer).trajectory
    spans = [{"version": span.version, "start": span.start, "end": span.end} for span in t.spans]
    return {"prompt_ids": t.prompt_ids, "completion_ids": t.completion_ids, "logprobs": t.logprobs, "spans": spans}
