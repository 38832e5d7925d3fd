"""Each route is sent the largest body that it takes, in its worst shapes, and the event loop stands still for none.

What is in these bodies is wrong for most routes; what is worst of what is right has tests/redis/test_event_loop.py.
"""

import asyncio
import http.client
import itertools
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import numpy as np
from fastapi import params
from fastapi.routing import APIRoute

from api.app import ROUTED
from api.http.limits import NUMBERS, PASSES, PROTOBUF, REQUESTS, UPLOADS, most_bytes, most_numbers
from shared.learners import ServiceCard
from shared.process.api_settings import ApiSettings
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import connect
from shared.redis.training.learner_store import LearnerStore
from tests.redis.adapter_versions import publish
from tests.redis.event_loops import LONGEST, event_loop, least_stop
from tests.redis.scripted_worker import MODEL, Answer, working
from tests.unit.test_bodies import api_routes
from tests.waiting import HANG_S

SETTINGS = ApiSettings(redis="redis://127.0.0.1:1")
VALUES = SETTINGS.max_json_values - 100
JSON, FORM = "application/json", "application/x-www-form-urlencoded"
PARTS = "multipart/form-data; boundary=parts"


class Sent(NamedTuple):
    """A request that is made before anything is measured."""

    name: str
    method: str
    path: str
    kind: str
    body: bytes


def listed(of: bytes, room: int, most: int) -> bytes:
    """A list of as many of these as there is room for, and as may be."""
    return b"[" + b",".join([of] * max(1, min(room // (len(of) + 1), most))) + b"]"


def shapes(room: int, values: int, objects: int) -> dict[str, bytes]:
    """Values for a field."""
    return {
        "numbers": listed(b"-0.5", room, values),
        "objects": listed(b"{}", room, objects),
        "nests": listed(b'{"a":[' * 25 + b"1" + b"]}" * 25, room, objects // 26),
        "depth": b"[" * min(room, 400_000),
    }


def written(**fields: bytes) -> bytes:
    """A JSON object of fields that are JSON already."""
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), value) for name, value in fields.items()) + b"}"


def bodies_of(route: APIRoute, method: str) -> Iterator[Sent]:
    """A route's bodies: all of its fields have the shape, and share the room."""
    path = route.path.replace(":path}", "}").replace("{version}", "1").replace("{segment}", "weights")
    path = "/".join("policy" if part.startswith("{") else part for part in path.split("/"))
    room = min(most_bytes(SETTINGS, path), 64 << 20) - 4096
    field = route.body_field.field_info if route.body_field is not None else None
    if isinstance(field, params.Form):
        yield Sent("many fields", method, path, FORM, b"a&" * (room // 2))
        yield Sent("a long field", method, path, FORM, b"key=" + b"%41" * (room // 3 - 4))
        return
    if UPLOADS.fullmatch(path):
        head, end = b"--parts\r\nContent-Disposition: form-data; name=", b"\r\n--parts--\r\n"
        yield Sent("lines", method, path, PARTS, head + b'"file"; filename="a"\r\n\r\n' + b"{}\n" * (1 << 21) + end)
        yield Sent("parts", method, path, PARTS, (head + b'"a"\r\n\r\n1\r\n') * 10_000 + end)
    fields = list(getattr(field and field.annotation, "model_fields", {})) or ["requests"]
    many = (1 << 24, 1 << 24) if path == REQUESTS else (VALUES, VALUES // 20)
    for name, value in shapes(room // len(fields) - 40, many[0] // len(fields) - 9, many[1] // len(fields)).items():
        yield Sent(name, method, path, JSON, written(**dict.fromkeys(fields, value)))


def bodies_of_numbers(learner: str) -> Iterator[Sent]:
    """Those of routes that take long bodies of numbers, of a learner and a policy that there are."""
    room, (values, objects) = SETTINGS.max_training_bytes - 4096, most_numbers(SETTINGS)
    model = b'"%s"' % learner.encode()
    for name, value in shapes(room, values - 99, objects - 9).items():
        yield Sent(name, "POST", "/v1/training/update", JSON, written(trajectories=value))
        given = written(data=value, loss_fn=b'"ppo"')
        yield Sent(name, "POST", "/api/v1/forward", JSON, written(model_id=model, seq_id=b"1", forward_input=given))
    half = listed(b"5", room, values // 2 - 99)
    one = written(prompt_ids=half, completion_ids=b"[5]", logprobs=b"[-1]", reward=b"1", loss_mask=half)
    yield Sent("a trajectory", "POST", "/v1/training/update", JSON, written(trajectories=b"[" + one + b"]"))
    tensor = written(data=half, dtype=b'"float32"')
    datum = written(model_input=written(chunks=b"[" + written(tokens=half) + b"]"), loss_fn_inputs=written(a=tensor))
    given = written(data=b"[" + datum + b"]", loss_fn=b'"ppo"')
    body = written(model_id=model, seq_id=b"1", forward_backward_input=given)
    yield Sent("a datum", "POST", PASSES, JSON, body)
    tokens, floats = b"[" + b",".join([b"5"] * 250) + b"]", b"[" + b",".join([b"-0.123456"] * 250) + b"]"
    one = written(prompt_ids=b"[5]", completion_ids=tokens, logprobs=floats, reward=b"1")
    yield Sent("good", "POST", "/v1/training/update", JSON, written(trajectories=listed(one, room, 4096)))
    inputs = {"logprobs": (b'"float32"', floats), "advantages": (b'"float32"', floats)}
    inputs["target_tokens"] = (b'"int64"', tokens)
    tensors = {name: written(data=data, dtype=dtype) for name, (dtype, data) in inputs.items()}
    datum = written(model_input=written(chunks=b"[" + written(tokens=tokens) + b"]"), loss_fn_inputs=written(**tensors))
    given = written(data=listed(datum, room, 4096), loss_fn=b'"ppo"')
    yield Sent("good", "POST", PASSES, JSON, written(model_id=model, seq_id=b"2", forward_backward_input=given))
    for name, (number, binary) in protobuf(learner, room).items():
        start = message(1, learner.encode()) + bytes([0x10, number])
        yield Sent(f"protobuf: {name}", "POST", PASSES, PROTOBUF, start + binary)


def message(number: int, content: bytes) -> bytes:
    """A field of bytes of a protobuf message."""
    size, length = bytearray(), len(content)
    while length > 127:
        size.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *size, length]) + content


def protobuf(learner: str, room: int) -> dict[str, tuple[int, bytes]]:
    """Data of passes, with the number of their request."""
    empty = message(3, b"")
    chunk, ids = message(1, b""), np.full(250, 5, "<i4").tobytes()
    target = message(
        2, message(1, b"target_tokens") + message(2, message(1, np.full(250, 5, "<i8").tobytes()) + b"\x18\x02")
    )
    floats = [
        message(2, message(1, name) + message(2, message(1, np.zeros(250, "<f4").tobytes()) + b"\x18\x01"))
        for name in (b"logprobs", b"advantages")
    ]
    datum = message(3, message(1, message(1, message(1, ids))) + target + b"".join(floats))
    return {
        "empty data": (1, empty * (room // 2)),
        "empty chunks": (1, message(3, chunk * (room // 2))),
        "a long shape": (1, message(3, message(2, message(2, message(4, b"\x01" * (room - 99)))))),
        "unknown fields": (1, b"\x78\x01" * (room // 2)),
        "constants": (1, message(5, b"") * (room // 2)),
        "one text": (1, message(4, b"\xc3\xa9" * (room // 2 - 99))),
        "good": (3, datum * 4096 + message(4, b"ppo")),
    }


def send(url: str, sent: Sent) -> tuple[int, bytes]:
    """Without the interpreter's lock, but for a few lines."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=HANG_S)
    try:
        connection.request(sent.method, sent.path, sent.body, {"Content-Type": sent.kind})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


async def made(redis_url: str, url: str) -> str:
    """A learner that waits for its service, and a policy."""
    redis = connect(redis_url)
    await LearnerStore(redis).announce(ServiceCard(id="s", model=MODEL, max_rank=8, max_learners=4))
    await publish(AdapterStore(redis))
    await redis.aclose()
    async with httpx.AsyncClient(base_url=f"{url}/api/v1", trust_env=False) as client:
        session = (await client.post("/create_session", json={})).json()["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 8}}
        return str((await client.post("/create_model", json=asked)).json()["model_id"])


def every_body(learner: str) -> Iterator[Sent]:
    yield from bodies_of_numbers(learner)
    routes = [route for module in ROUTED for route in api_routes(module.router.routes)]
    for route in routes:
        for method in sorted({"POST", "PUT", "PATCH", "DELETE"} & (route.methods or set())):
            if route.path not in NUMBERS:
                read = route.body_field is not None or route.dependant.request_param_name is not None
                yield from itertools.islice(bodies_of(route, method), None if read else 1)


async def test_no_body_that_a_route_takes_stops_the_event_loop_for_long(redis_url: str) -> None:
    slow, good = dict[str, float](), 0
    async with working(redis_url, lambda spec: Answer("hi")):
        with event_loop(redis_url) as loop:
            for sent in every_body(await made(redis_url, loop.url)):
                (status, answer), took = await least_stop(loop, partial(asyncio.to_thread, send, loop.url, sent))
                name = f"{sent.method} {sent.path}: {sent.name}"
                print(f"{name}: {took} {len(sent.body)} {status} {answer[:80]!r}")
                assert status < 500 or status == 503, (name, answer[:300])
                assert status == 200 or sent.name != "good" or sent.path not in PASSES, (name, answer[:300])
                good += status == 200 and sent.name.endswith("good")
                if took > LONGEST:
                    slow[name] = round(took, 1)
    assert not slow, f"for how long the event loop stood still, in times of the known work: {slow}"
    assert good == 2, "both passes that are right were placed"
