"""POST /v1/feedback: a verdict on an answer of the last days; GET shows what waits for one, and what has got one.

Where the server keeps answers (`--feedback-ttl-days`), each completion of a request that does not say
`collect_trajectory` is one, but for keys with `feedback=no`. A verdict makes it a trajectory of its policy's trainer,
once; two answers of which one is preferred become a group of two.
"""

import asyncio
import re
import time
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from pydantic import Field, field_validator, model_validator
from starlette.responses import Response

from api.callers.caller import asker
from api.callers.fair_pool import aside
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.fields import RequestModel, complaint
from api.ring.choosing import from_each
from api.ring.ring import Ring, TheRing
from api.ring.stored_sessions import stored_session
from shared.errors import ConflictError, InvalidRequestError, NotFoundError
from shared.redis.kept.answer_store import StoredAnswer, Verdict, answers_of, live_of
from shared.redis.kept.episode_store import episodes_of
from shared.signals import MOST_TEXT, Signal, kept_share
from shared.splits import MOST_REWARD

router = APIRouter(tags=["training"], route_class=BodyRoute)

STARS = 5
STORED_WITHIN_S = 2.0  # of its end an answer is kept; feedback may come sooner
_VERDICTS = ("reward", "rating", "preferred_over", "exit_code", "tests", "edited")
_PREFIX = re.compile(r"(?:chatcmpl-|cmpl-|resp_|msg_)?(.*)", re.DOTALL)


class TestCounts(RequestModel):
    """Tests of an agent's work."""

    passed: int = Field(ge=0, le=10**9)
    failed: int = Field(ge=0, le=10**9)

    @model_validator(mode="after")
    def _any(self) -> "TestCounts":
        if not self.passed + self.failed:
            raise complaint("passed", "no test has run")
        return self


class FeedbackBody(RequestModel):
    """One verdict, or a remark."""

    id: str = Field(
        default="", max_length=256, description="of the completion, response or message; or name its session"
    )
    session: str = Field(
        default="", max_length=160, description="the session whose last turn is meant, or without 'id' that turn"
    )
    choice: int = Field(default=0, ge=0, le=1023, description="which of its choices")
    reward: float | None = Field(default=None, ge=-MOST_REWARD, le=MOST_REWARD, description="the reward of the answer")
    rating: Literal["up", "down"] | Annotated[int, Field(strict=True, ge=1, le=STARS)] | None = Field(
        default=None, description="up: reward 1, down: 0; 1 to 5 stars: 0 to 1"
    )
    preferred_over: str | None = Field(
        default=None, min_length=1, max_length=256, description="the id of another answer to the same prompt"
    )
    preferred_over_choice: int = Field(default=0, ge=0, le=1023, description="which of its choices")
    exit_code: int | None = Field(
        default=None,
        ge=-(2**31),
        lt=2**32,
        description="of what an agent has run after its work; 0: it went well",
    )
    tests: TestCounts | None = Field(default=None, description="of the work so far, as an agent has run them")
    edited: str | None = Field(
        default=None, max_length=MOST_TEXT, description="the reply as the user has left it after an edit"
    )
    text: str | None = Field(
        default=None, max_length=4096, description="a remark: stored with the verdict, or, alone, until there is one"
    )
    key: str | None = Field(default=None, max_length=256, description="the same key gives the same answer")

    @field_validator("rating", mode="before")
    @classmethod
    def _rated(cls, value: Any) -> Any:
        if value in (None, "up", "down") or (type(value) is int and 1 <= value <= STARS):
            return value
        raise complaint("", f"'up', 'down', or 1 to {STARS} stars")

    @model_validator(mode="after")
    def _one(self) -> "FeedbackBody":
        if not self.id and not self.session:
            raise complaint("id", "say which answer: its 'id', or its 'session'")
        given = [name for name in _VERDICTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise complaint(given[1], f"give one of '{given[0]}' and '{given[1]}'")
        if not given and self.text is None:
            raise complaint("reward", f"say one of {', '.join(_VERDICTS)}, or 'text'")
        return self

    def signal(self, written: str) -> Signal | None:
        """Signal that the body reports of the turn with this reply; None for a verdict or a remark."""
        if self.exit_code is not None:
            return Signal("exit_code", float(self.exit_code == 0), detail=f"exit code {self.exit_code}")
        if self.tests is not None:
            passed, failed = self.tests.passed, self.tests.failed
            return Signal("tests", passed / (passed + failed), detail=f"{passed} passed, {failed} failed")
        if self.edited is not None:
            return Signal("edit", kept_share(written[:MOST_TEXT], self.edited), text=self.edited)
        return None

    @property
    def value(self) -> float | None:
        """The reward that it comes to; None when it says none."""
        if self.preferred_over is not None or self.rating == "up":
            return 1.0
        if isinstance(self.rating, int):
            return (self.rating - 1) / (STARS - 1)
        return 0.0 if self.rating == "down" else self.reward


@router.post(
    "/v1/feedback",
    summary="Judge an answer",
    response_class=Response,
    responses={200: {"description": "What was counted"}, **error_responses(400, 404, 409, 413, 429, 503)},
)
async def feedback(body: FeedbackBody, ring: TheRing) -> Response:
    """The first verdict on an answer stands: to send it again changes nothing, another one gets 409.

    `status` is `counted` (its policy's trainer gets it), `noted` (a remark alone), `signal` (it counts for the reward
    of the session's turn, with its other signals) or `late` (a verdict after that reward has gone to the trainer: it
    counts for what is learned from sessions later).
    """
    keeper = answers_of(asker().tenant)
    if not body.id:
        turns = (await stored_session(ring, asker().tenant, body.session)).turns
        body.id, _, number = turns[-1].turn.name.rpartition("-")
        body.choice = int(number)
    ring, answer = await _found(ring, keeper, body.id, body.choice, "id")
    value = body.value
    told = body.signal(live_of(answer).trajectory.text) if value is None else Signal("verdict", value)
    if told is not None and answer.session:
        await ring.episodes.signal(episodes_of(asker().tenant), answer.session, answer.name, told)
    if told is not None and told.kind != "verdict":
        if not answer.session:
            raise InvalidRequestError("this answer is part of no session, where such a signal would count", param="id")
        return json_reply(_answer_body(answer, "signal", told.value))
    if value is None:
        await ring.answers.note(keeper, answer.name, body.text or "")
        return json_reply(_answer_body(answer, "noted", None))
    verdicts = {answer.name: Verdict(value, text=body.text or "")}
    if body.preferred_over is not None:
        preferred_over, choice = body.preferred_over, body.preferred_over_choice
        _, other = await _found(ring, keeper, preferred_over, choice, "preferred_over")
        await aside(_check_pair, answer, other)
        verdicts = {
            answer.name: Verdict(value, over=other.name, text=body.text or ""),
            other.name: Verdict(0.0, under=answer.name),
        }
    if not await ring.answers.judge(keeper, verdicts, body.key or ""):
        now = await ring.answers.find(keeper, answer.name)
        if now is not None and now.verdict is not None and now.verdict.by and body.preferred_over is None:
            return json_reply(_answer_body(answer, "late", value))
        value = await _standing(ring, keeper, answer.name, body)
    return json_reply(_answer_body(answer, "counted", value))


async def _standing(ring: Ring, keeper: str, name: str, body: FeedbackBody) -> float:
    """The reward of the verdict that the answer has by this idempotency key; else ConflictError."""
    now = await ring.answers.find(keeper, name)
    if now is None:
        raise _unknown(body.id, "id", body.choice)
    if body.key and now.key == body.key and now.verdict is not None:
        return now.verdict.reward
    raise ConflictError(
        "this answer, or the one that it is compared with, has another verdict already, or is gone", param="id"
    )


@router.get(
    "/v1/feedback",
    summary="List answers",
    response_class=Response,
    responses={200: {"description": "Answers, the newest first"}, **error_responses(400)},
)
async def listed(
    ring: TheRing,
    state: Literal["waiting", "judged"] = "waiting",
    after: Annotated[str, Query(max_length=512, description="the `name` after which the page begins")] = "",
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """The asker's answers that wait for a verdict, or that have one; pairs name the other answer."""
    _check_stored(ring)
    keeper = answers_of(asker().tenant)
    if after and await ring.answers.find(keeper, after) is None:
        raise _unknown(after, "after")
    found = await ring.answers.list(keeper, judged=state == "judged", after=after, limit=limit + 1)

    def shown() -> bytes:
        data = [_shown(answer) for answer in found[:limit]]
        return msgspec.json.encode({"object": "list", "data": data, "has_more": len(found) > limit})

    return Response(await aside(shown), media_type="application/json")


def _name(given: str, choice: int) -> str:
    found = _PREFIX.fullmatch(given)
    assert found is not None, "any text matches"
    return f"{found[1]}-{choice}"


async def _found(ring: Ring, keeper: str, id: str, choice: int, param: str) -> tuple[Ring, StoredAnswer]:
    """The answer and the ring of its model; one that has only just been given may not be kept yet."""
    _check_stored(ring)
    name = _name(id, choice)
    until = time.monotonic() + STORED_WITHIN_S
    while not (found := await from_each(ring, lambda each: each.answers.find(keeper, name))) or found[0][1] is None:
        if time.monotonic() > until:
            raise _unknown(id, param, choice)
        await asyncio.sleep(0.1)
    there, answer = found[0]
    assert answer is not None, "looked at above"
    return there, answer


def _check_stored(ring: Ring) -> None:
    if not ring.settings.feedback_ttl_s:
        raise InvalidRequestError("this server keeps no answers for feedback (--feedback-ttl-days)")


def _unknown(id: str, param: str, choice: int = 0) -> NotFoundError:
    of = f"choice {choice} of " if choice else ""
    return NotFoundError(
        f"no answer {of}{id[:200]!r} waits for feedback: it is not this tenant's, was cut short, asked for "
        "'collect_trajectory' itself, or its time is over",
        param=param,
    )


def _check_pair(answer: StoredAnswer, other: StoredAnswer) -> None:
    if answer.name == other.name:
        raise InvalidRequestError("an answer is not compared with itself", param="preferred_over")
    first, second = live_of(answer), live_of(other)
    if first.policy != second.policy or first.trajectory.prompt_ids != second.trajectory.prompt_ids:
        raise InvalidRequestError(
            "a preference compares two answers of one policy to the same prompt", param="preferred_over"
        )


def _answer_body(answer: StoredAnswer, status: str, reward: float | None) -> dict[str, Any]:
    return {
        "object": "feedback",
        "name": answer.name,
        "status": status,
        "policy": answer.policy,
        "trajectory": answer.id,
        "reward": reward,
    }


def _shown(answer: StoredAnswer) -> dict[str, Any]:
    live, verdict = live_of(answer), answer.verdict
    trajectory = live.trajectory
    return {
        "object": "feedback.answer",
        "name": answer.name,
        "trajectory": live.id,
        "created_ms": live.collected_ms,
        "model": live.model,
        "policy": live.policy,
        "versions": [span.version for span in trajectory.spans],
        "prompt_ids": trajectory.prompt_ids,
        "completion_ids": trajectory.completion_ids,
        "text": trajectory.text,
        "note": answer.note or None,
        "reward": None if verdict is None else verdict.reward,
        "preferred_over": None if verdict is None else verdict.over or None,
        "preferred_under": None if verdict is None else verdict.under or None,
        "remark": None if verdict is None else verdict.text or None,
    }
