"""Training from outside: post trajectories, look at a trainer, save a checkpoint.

The trainer is another process. What it is asked goes through a stream of orders in Redis and is answered there; what it
reports of itself stands on its board. Without a live trainer an order is refused (503), and looking still works.
"""

import hashlib
import time
import uuid
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.responses import Response

from api.callers.caller import asker
from api.callers.fair_pool import aside
from api.generation.target import card_of_base, check_published
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.fields import rfc3339
from api.http.limits import most_numbers
from api.ring.choosing import ring_of_adapter
from api.ring.ring import Ring, ring_of
from api.tenants import Right, check
from api.training.body import (
    CheckpointBody,
    ReadingContext,
    ResumeBody,
    UpdateBody,
    parsed_version,
    policy_named,
    unknown,
    update_decoder,
    update_read,
)
from shared.adapters import check_name, version_id
from shared.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ParallmError,
    ServiceUnavailableError,
    UnknownAdapterError,
    from_code,
)
from shared.redis import keys
from shared.redis.training.board import TrainingBoard
from shared.redis.training.orders import Orders
from shared.redis.training.trajectory_queue import TrajectoryQueue
from shared.sequences import ModelCard
from shared.training import (
    Answer,
    CheckpointAnswer,
    CheckpointOrder,
    Refusal,
    ResumeAnswer,
    ResumeOrder,
    UpdateAnswer,
    check_checkpoint_name,
)

router = APIRouter(tags=["training"], route_class=BodyRoute)
TheRing = Annotated[Ring, Depends(ring_of)]
PolicyName = Annotated[str, Query(description="default: the setting `default_adapter`")]
IdempotencyKey = Annotated[str, Header(max_length=256, description="the same key gives the same answer")]

_LOOK_S = 2.0  # how often a waiting request looks whether the trainer lives
_answer = msgspec.json.Decoder(Answer)


@router.post(
    "/v1/training/update",
    summary="Train on trajectories",
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/json": {"schema": UpdateBody.model_json_schema()}}}
    },
    response_class=Response,
    responses={200: {"description": "What became of the update"}, **error_responses(400, 404, 409, 413, 429, 503, 504)},
)
async def update(request: Request, ring: TheRing, idempotency_key: IdempotencyKey = "") -> Response:
    """One train step on the given trajectories, through the gate, served unless `update_inference` is false.

    `status` is `updated`, `rejected` (the gate's checks stand in `gate`; nothing has changed) or `no_signal` (no group
    had samples with different rewards).
    """
    async with ring.bodies.reading(await request.body()) as reading:
        ring, policy = await _policy(ring, (await reading.call(policy_named, None)).decode(), "change")
        card, most = await _card(ring, policy), most_numbers(ring.settings)
        asked = ReadingContext(*most, policy, card.name, card.vocab_size, card.context_length)
        read = await aside(update_decoder.decode, await reading.call(update_read, asked))
    check_checkpoint_name(read.checkpoint_name)
    await _check_versions(ring, read.versions)
    answer = await _ordered(ring, policy, read.order, idempotency_key)
    assert isinstance(answer, UpdateAnswer)
    lora = version_id(policy, answer.version) if answer.version else None
    return json_reply(_shown(answer, "training.update", policy) | {"lora": lora})


@router.post(
    "/training/checkpoint",
    summary="Save a checkpoint",
    response_class=Response,
    responses={200: {"description": "The checkpoint's name"}, **error_responses(400, 429, 503, 504)},
)
async def checkpoint(
    ring: TheRing, body: CheckpointBody | None = None, idempotency_key: IdempotencyKey = ""
) -> Response:
    """Save what is needed to resume: adapter, optimizer, progress; after the train step that runs now."""
    body = body or CheckpointBody()
    if body.name and body.checkpoint_name and body.name != body.checkpoint_name:
        raise InvalidRequestError("'name' and 'checkpoint_name' differ", param="checkpoint_name")
    ring, policy = await _policy(ring, body.policy, "change")
    name = check_checkpoint_name(body.name or body.checkpoint_name)
    answer = await _ordered(ring, policy, msgspec.json.encode(CheckpointOrder(name)), idempotency_key)
    assert isinstance(answer, CheckpointAnswer)
    return json_reply(_shown(answer, "training.checkpoint", policy))


@router.post(
    "/v1/training/resume",
    summary="Go on with a paused run",
    response_class=Response,
    responses={200: {"description": "What is served and trained from now on"}, **error_responses(400, 409, 429, 503)},
)
async def resume(body: ResumeBody, ring: TheRing, idempotency_key: IdempotencyKey = "") -> Response:
    """For a run that is paused because somebody else has moved `latest` of its policy; 409 when it is not.

    `adopt`: train on from their version; `override`: serve the run's own version again.
    """
    ring, policy = await _policy(ring, body.policy, "change")
    answer = await _ordered(ring, policy, msgspec.json.encode(ResumeOrder(body.action)), idempotency_key)
    assert isinstance(answer, ResumeAnswer)
    shown = _shown(answer, "training.resume", policy)
    return json_reply(shown | {"lora": version_id(policy, answer.version)})


@router.get(
    "/v1/training/status",
    summary="How training goes",
    response_class=Response,
    responses={200: {"description": "The trainer's state, its policy and its checkpoints"}, **error_responses(404)},
)
async def status(ring: TheRing, policy: PolicyName = "") -> Response:
    """The trainer of a policy, alive or not, and what is served of it."""
    ring, name = await _policy(ring, policy)
    board = TrainingBoard(ring.redis, name)
    alive, trainer, stats = await board.alive(), await board.status(), await board.trajectories()
    try:
        summary = await ring.adapters.summary(name)
    except UnknownAdapterError:
        if policy and trainer is None:
            raise
        summary = None
    latest = version_id(name, summary.latest) if summary and summary.latest else None
    shown = {
        "training_enabled": bool(alive),
        "current_lora": latest,
        "trajectories_collected": stats.collected,
        "last_update": _moment(trainer.last_update_ms) if trainer else None,
        "loss": trainer.loss if trainer else None,
        "available_checkpoints": list(trainer.checkpoints) if trainer else [],
        "policy": name,
        "best_lora": version_id(name, summary.best) if summary and summary.best else None,
        "trajectories": msgspec.to_builtins(stats),
        "alerts": await board.alert_counts(),
        "trainer": None if trainer is None else {**msgspec.to_builtins(trainer), "owner": alive or trainer.owner},
    }
    return json_reply(shown)


@router.get(
    "/debug/training",
    summary="Everything about training",
    response_class=Response,
    responses={200: {"description": "Board, curves, alerts, queues, versions"}},
)
async def debug(ring: TheRing, policy: PolicyName = "", points: Annotated[int, Query(ge=0, le=4096)] = 50) -> Response:
    """Returns everything that Redis holds of a policy's training, for a person who looks for a fault."""
    ring, name = await _policy(ring, policy)
    board = TrainingBoard(ring.redis, name)
    try:
        adapter: Any = await ring.adapters.summary(name)
        rejected = [
            m for v in adapter.versions[-20:] if (m := await ring.adapters.manifest(name, v)).status == "rejected"
        ]
    except UnknownAdapterError:
        adapter, rejected = None, []
    return json_reply(
        {
            "policy": name,
            "alive": await board.alive() or None,
            "trainer": await board.status(),
            "points": await board.points(points) if points else [],
            "alert_counts": await board.alert_counts(),
            "alerts": await board.alerts(20),
            "trajectories": await board.trajectories(),
            "orders_waiting": await Orders(ring.redis, keys.training_orders(name)).length(),
            "adapter": adapter,
            "rejected": [{"version": m.version, "gate": m.gate} for m in rejected],
            "history": await ring.adapters.history(name, 20),
            "loaded_by": await ring.adapters.acks(name),
        }
    )


@router.get(
    "/v1/training/trajectories",
    summary="Look at collected trajectories",
    response_class=Response,
    responses={200: {"description": "Trajectories that wait for the trainer, oldest first"}},
)
async def waiting_trajectories(
    ring: TheRing,
    policy: PolicyName = "",
    after: Annotated[str, Query(pattern=r"^([0-9]{1,19}-[0-9]{1,19})?$", description="`last` of the page before")] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """Takes nothing: the trainer still gets them. Each can be posted to /v1/training/update as it is."""
    ring, name = await _policy(ring, policy)
    page = await TrajectoryQueue(ring.redis, name).peek(after, limit)
    data = []
    for delivered in page:
        if not asker().sees(delivered.live.tenant):
            continue
        outer = msgspec.to_builtins(delivered.live)
        data.append({**outer.pop("trajectory"), **outer})
    last = page[-1].entry if page else after
    return json_reply({"object": "list", "data": data, "last": last, "has_more": len(page) == limit})


async def _policy(ring: Ring, given: str, right: Right = "see") -> tuple[Ring, str]:
    """A policy's ring and name."""
    try:
        name = check_name(given or ring.settings.default_adapter)
    except InvalidRequestError as error:
        error.param = "policy"
        raise
    ring = (await ring_of_adapter(ring, name)).ring
    await check(ring, "policy", name, right, param="policy")
    return ring, name


async def _card(ring: Ring, policy: str) -> ModelCard:
    """The model that the policy is trained on."""
    try:
        summary = await ring.adapters.summary(policy)
    except UnknownAdapterError:
        await check_published(ring, policy)
        raise _no_trainer(policy) from None
    return await card_of_base(ring, summary.base_sha256)


async def _check_versions(ring: Ring, named: dict[str, tuple[int, str]]) -> None:
    missing = set()
    for version, (index, field) in named.items():
        try:
            await ring.adapters.manifest(*parsed_version(version, index, field))
        except UnknownAdapterError:
            missing.add(version)
    if missing:
        raise unknown(missing, named)


async def _ordered(ring: Ring, policy: str, order: bytes, idempotency_key: str) -> Answer:
    """Place an order, which is JSON, and wait for its answer; raises what the trainer refuses it with."""
    orders, board = Orders(ring.redis, keys.training_orders(policy)), TrainingBoard(ring.redis, policy)
    order_id = f"order-{uuid.uuid4().hex}"
    if idempotency_key:
        order_id = f"order-{hashlib.sha256(f'{policy}/{idempotency_key}'.encode()).hexdigest()[:32]}"
    until = time.monotonic() + ring.settings.request_timeout_s
    reply = await orders.answer(order_id, 0)
    if reply is None:
        if not await board.alive():
            raise _no_trainer(policy)
        await orders.place(order_id, order, ring.settings.request_timeout_s)
    while reply is None and time.monotonic() < until:
        reply = await orders.answer(order_id, min(_LOOK_S, until - time.monotonic()))
        if reply is None and not await board.alive():
            raise ServiceUnavailableError(
                f"the trainer of policy '{policy}' ended before it answered; if it comes back, it carries out what it "
                "had begun"
            )
    if reply is None:
        raise DeadlineExceededError(f"the trainer of policy '{policy}' has not answered in time (order {order_id})")
    answer: Answer = _answer.decode(reply)
    if isinstance(answer, Refusal):
        raise from_code(answer.code, answer.message) if answer.code else ParallmError(answer.message)
    return answer


def _no_trainer(policy: str) -> ServiceUnavailableError:
    start = f"start one with mlx_parallm_train --adapter {policy} --source posted"
    return ServiceUnavailableError(f"no trainer of policy '{policy}' is alive: {start}", retry_after_s=10)


def _shown(answer: Answer, kind: str, policy: str) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(answer)
    return {"object": kind, "policy": policy} | {name: value for name, value in fields.items() if name != "type"}


def _moment(unix_ms: int) -> str | None:
    """By RFC 3339; None for never."""
    return rfc3339(unix_ms // 1000) if unix_ms else None
