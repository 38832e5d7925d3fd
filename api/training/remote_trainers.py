"""/v1/trainers/{policy}: the ring's side of a trainer that knows the api alone (`mlx_parallm_train --over-http`).

It reports that it owns the policy and how it goes, as a trainer with Redis writes on its board; orders that users place
with /v1/training/update and /training/checkpoint are handed to it here. Samples come from /v1/jobs, versions go to
/v1/adapters. The holder of the policy is believed: keep keys to those who may train.
"""

import time
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi import Path as PathParameter
from starlette.responses import Response

from api.callers.caller import asker
from api.http.errors import error_responses, json_reply
from api.ring.ring import Ring, ring_of
from shared.adapters import NAME
from shared.errors import ConflictError, InvalidRequestError, UnknownModelError
from shared.redis import keys
from shared.redis.training.board import TrainingBoard, ring_id
from shared.redis.training.orders import Orders
from shared.training import Alert, AnswerLetter, Beat, Holder, TakenOrder, TakeOrders

router = APIRouter(tags=["training"])
TheRing = Annotated[Ring, Depends(ring_of)]
Policy = Annotated[str, PathParameter(pattern=f"^{NAME}$")]

MAX_OWNER = 256
T = TypeVar("T")


def _schema(kind: Any) -> dict[str, Any]:
    (reference,), components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
    return {"application/json": {"schema": {**reference, "$defs": components}}}


def _body(kind: Any) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": _schema(kind)}}


def _answer(kind: Any, description: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": description, "content": _schema(kind)}}


@router.put(
    "/v1/trainers/{policy}",
    summary="Hold a policy and report how training goes",
    openapi_extra=_body(Beat),
    response_class=Response,
    responses={**_answer(Holder, "Who owns the policy from now on"), **error_responses(400, 404)},
)
async def beat(policy: Policy, request: Request, ring: TheRing) -> Response:
    """Own the policy for a few seconds more; the rest counts only if `owner` in the answer is the caller's."""
    heartbeat = await _read(request, Beat)
    if not 1 <= len(heartbeat.owner) <= MAX_OWNER:
        raise InvalidRequestError(f"'owner' has 1 to {MAX_OWNER} characters", param="owner")
    if heartbeat.status is not None and heartbeat.status.policy != policy:
        raise InvalidRequestError(f"the status of policy {heartbeat.status.policy!r}", param="status.policy")
    model = await _model(ring, heartbeat.base_sha256) if heartbeat.base_sha256 else ""
    name = await ring_id(ring.redis) if heartbeat.base_sha256 else ""
    board = TrainingBoard(ring.redis, policy)
    holder = await board.hold(heartbeat.owner, heartbeat.instead_of, asker())
    if holder == heartbeat.owner:
        if heartbeat.point is not None:
            await board.add(heartbeat.point)
        if heartbeat.status is not None:
            changes = {"owner": heartbeat.owner, "ranks": (), "heartbeat_ms": int(time.time() * 1000)}
            await board.write(msgspec.structs.replace(heartbeat.status, **changes))
    return json_reply(Holder(holder, model, name))


@router.delete("/v1/trainers/{policy}", summary="Let a policy go")
async def let_go(policy: Policy, ring: TheRing, owner: Annotated[str, Query(max_length=MAX_OWNER)]) -> dict[str, Any]:
    """The trainer ends; somebody else's policy stays theirs."""
    await TrainingBoard(ring.redis, policy).let_go(owner)
    return {"policy": policy, "owner": owner, "object": "trainer", "deleted": True}


@router.post(
    "/v1/trainers/{policy}/alerts",
    summary="Raise an alert",
    openapi_extra=_body(Alert),
    response_class=Response,
    responses=error_responses(400),
)
async def alert(policy: Policy, request: Request, ring: TheRing) -> Response:
    """Keep an alert, count it, and notify clients that listen."""
    raised = await _read(request, Alert)
    await TrainingBoard(ring.redis, policy).alert(raised.kind, raised.message)
    return json_reply({"object": "alert"})


@router.post(
    "/v1/trainers/{policy}/orders",
    summary="Take what users have ordered",
    openapi_extra=_body(TakeOrders),
    response_class=Response,
    responses={**_answer(list[TakenOrder], "Orders, oldest first"), **error_responses(400, 409)},
)
async def take_orders(policy: Policy, request: Request, ring: TheRing) -> Response:
    """Orders that stay the trainer's until they are finished; 409 when it does not hold the policy."""
    asked = await _read(request, TakeOrders)
    await _held(ring, policy, asked.owner)
    orders = Orders(ring.redis, keys.training_orders(policy))
    if asked.after:
        if not _is_entry(asked.after):
            raise InvalidRequestError("'after' is the entry of an order", param="after")
        taken = await orders.unfinished(keys.TRAINER, asked.after, 1)
    else:
        taken = await orders.fresh(keys.TRAINER, 1)
    shown = [
        TakenOrder(order.entry, order.id, msgspec.Raw(order.body), order.deadline_ms, order.again, order.too_late)
        for order in taken
    ]
    return json_reply(shown)


@router.post(
    "/v1/trainers/{policy}/orders/answers",
    summary="Answer or finish an order",
    openapi_extra=_body(AnswerLetter),
    response_class=Response,
    responses=error_responses(400, 409),
)
async def answer_order(policy: Policy, request: Request, ring: TheRing) -> Response:
    """Notify the clients that wait, if there is an answer; with `done` the order will not come again."""
    letter = await _read(request, AnswerLetter)
    await _held(ring, policy, letter.owner)
    if not _is_entry(letter.entry):
        raise InvalidRequestError("'entry' is that of an order", param="entry")
    orders = Orders(ring.redis, keys.training_orders(policy))
    if letter.answer is not None:
        await orders.reply(letter.id, msgspec.json.encode(letter.answer))
    if letter.done:
        await orders.done([letter.entry])
    return json_reply({"object": "order", "id": letter.id, "done": letter.done})


async def _held(ring: Ring, policy: str, owner: str) -> None:
    holder = await TrainingBoard(ring.redis, policy).alive()
    if holder != owner:
        raise ConflictError(f"policy '{policy}' is held by {holder or 'no trainer'}, not by {owner[:MAX_OWNER]}")


async def _model(ring: Ring, base_sha256: str) -> str:
    """The served model with this base."""
    for card in (await ring.live_models()).values():
        if card.base_sha256 == base_sha256:
            return card.name
    raise UnknownModelError(f"no live worker serves a model with base {base_sha256[:12]}", param="base_sha256")


async def _read(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not what is asked for: {error}") from error


def _is_entry(text: str) -> bool:
    head, dash, tail = text.partition("-")
    return bool(dash) and all(part.isascii() and part.isdigit() and len(part) < 20 for part in (head, tail))
