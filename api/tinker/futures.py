"""The results of what was asked: by long polls, as protobuf where the client reads it.

Not there yet: 408, upon which the SDK asks again. Gone for ever: 410, upon which it begins anew. A request that was
refused has a result, too: its error, and whose fault it was.
"""

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from api.callers.fair_pool import aside
from api.http.bodies import BodyRoute
from api.http.errors import error_responses, json_reply
from api.http.limits import PROTOBUF
from api.ring.ring import Ring, TheRing
from api.tinker.bodies import FutureBody
from api.tinker.names import INFLIGHT, SavePath, keeper, sampler_of, spec_named
from api.tinker.protobuf import pass_bytes
from api.tinker.sampling import cancel_sample
from shared.adapters import version_id
from shared.errors import GoneError, InvalidRequestError, NotFoundError
from shared.learners import (
    Answer,
    BeginDone,
    CallDone,
    LearnerSpec,
    LoadDone,
    PassDone,
    RequestFailed,
    SaveDone,
    StepDone,
)
from shared.redis import keys
from shared.redis.poll import Backoff
from shared.redis.training.tinker_store import TinkerSample, TinkerSampler

router = APIRouter(tags=["tinker"], prefix="/api/v1", route_class=BodyRoute)

POLL_S = 20.0  # the SDK gives up a poll after 45


@router.post("/retrieve_future", summary="A result", response_class=Response, responses=error_responses(400, 404))
async def retrieve_future(body: FutureBody, request: Request, ring: TheRing) -> Response:
    """Returns the result of a learner's request or of a sample, for which it waits a while."""
    first, _, last = body.request_id.rpartition(":sample:")
    if ":train:" not in body.request_id:
        if not (first and last.isdigit()):
            raise _gone()
        return await _sample(ring, body.request_id)
    session, _, rest = body.request_id.partition(":train:")
    latest = rest.count(":") == 3 and rest.endswith(INFLIGHT)
    numbers = rest.removesuffix(INFLIGHT).split(":") if latest else rest.split(":")
    if len(numbers) not in (2, 3) or not all(each.isdigit() and len(each) < 11 for each in numbers):
        raise InvalidRequestError("this is no id of a request", param="request_id")
    spec = await spec_named(ring, f"{session}:train:{numbers[0]}")
    try:
        answer = await ring.learners.answer(spec.id, int(numbers[1]) + 1, POLL_S)
    except NotFoundError as error:
        raise _gone() from error
    if answer is None:
        return _again(body.request_id)
    if isinstance(answer, PassDone):
        if PROTOBUF in request.headers.get("accept", ""):
            return Response(await aside(pass_bytes, answer), media_type=PROTOBUF)
        return Response(await aside(_written_pass, answer), media_type="application/json")
    sampler = sampler_of(session, int(numbers[2])) if len(numbers) == 3 else ""
    return json_reply(await _shown(ring, spec, answer, sampler, latest))


@router.post("/cancel_future", summary="Cancel a sample", response_class=Response, responses=error_responses(400))
async def cancel_future(body: FutureBody, ring: TheRing) -> Response:
    """Requests of learners are carried out in any case: later ones count on that."""
    if ":train:" not in body.request_id:
        await cancel_sample(ring, body.request_id)
    return json_reply({})


async def _sample(ring: Ring, id: str) -> Response:
    until, backoff = time.monotonic() + POLL_S, Backoff()
    while True:
        found = await ring.tinker.find(keeper(), TinkerSample, id)
        if found is None:
            raise _gone()
        if found.state == "done":
            return Response(found.result, media_type=PROTOBUF)
        if found.state == "failed":
            return json_reply({"error": found.error, "category": found.fault})
        if found.api != ring.api_id and not await ring.redis.exists(keys.api(found.api)):
            await ring.tinker.forget(keeper(), TinkerSample, id)
            raise _gone()
        if time.monotonic() > until:
            return _again(id)
        await backoff.pause()


async def _shown(ring: Ring, spec: LearnerSpec, answer: Answer, sampler: str, latest: bool) -> dict[str, Any]:
    match answer:
        case RequestFailed():
            return {"error": answer.message, "category": answer.fault}
        case BeginDone():
            return {"type": "create_model", "model_id": spec.id}
        case StepDone():
            return {"metrics": answer.metrics}
        case LoadDone():
            return {"type": "load_weights", "model_id": spec.id}
        case SaveDone(kind="state"):
            return {"type": "save_weights", "path": str(SavePath(spec.id, "state", answer.name))}
        case SaveDone(kind="external"):
            return {"type": "save_weights_external", "path": str(SavePath(spec.id, "external", answer.name))}
        case SaveDone():
            path = str(SavePath(spec.id, "sampler", answer.name))
            if sampler:
                adapter = spec.adapter if latest else version_id(spec.adapter, answer.version)
                await ring.tinker.put(keeper(), sampler, TinkerSampler(sampler, spec.model, adapter, path))
            return {"type": "save_weights_for_sampler", "path": path, "sampling_session_id": sampler or None}
        case PassDone() | CallDone():
            raise _gone()  # of a run's learner, which is no client's; passes are written elsewhere


def _written_pass(answer: PassDone) -> bytes:
    """As JSON, array by array: a long one in one piece would keep the interpreter's lock."""
    outputs = [
        {
            name: {
                "data": msgspec.Raw(msgspec.json.encode(values.array().ravel().tolist())),
                "dtype": values.dtype,
                "shape": values.shape,
            }
            for name, values in output.items()
        }
        for output in answer.outputs
    ]
    shown = {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": answer.metrics}
    return msgspec.json.encode(shown)


def _again(id: str) -> Response:
    return json_reply({"type": "try_again", "request_id": id, "queue_state": "active"}, 408)


def _gone() -> GoneError:
    return GoneError("the result of this request is not there, or not any more", param="request_id")
