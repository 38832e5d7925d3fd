"""Tinker's protocol without its SDK: what is placed, what comes back, what is refused.

The training service is played by the test. A real one runs in tests/e2e/served/test_learners.py, the SDK in
tests/clients.
"""

from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from redis.asyncio import Redis

from api.http.api_keys import KeyRing
from api.tinker.protobuf import MESSAGE, read_pass
from shared.errors import InvalidRequestError
from shared.images.refs import VisionSpec
from shared.learners import (
    BeginDone,
    BeginRequest,
    ImagePassRequest,
    LoadRequest,
    PassDone,
    PassRequest,
    RefusedRequest,
    Request,
    RequestFailed,
    SaveDone,
    SaveInfo,
    ServiceCard,
    StepDone,
    StepRequest,
    Values,
)
from shared.process.api_settings import ApiSettings
from shared.redis import keys
from shared.redis.training.tinker_store import TinkerSample
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api
from tests.redis.scripted_worker import MODEL, Answer
from tests.waiting import NEVER_S, wait_until

PROTOBUF = {"content-type": "application/x-protobuf"}
TARGETS = {"target_tokens": [6, 7], "weights": [0.0, 1.0]}


def script(spec: Any) -> Answer:
    return Answer("hi")


async def ask(server: Api, route: str, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = await server.post(f"/api/v1/{route}", body)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def future(server: Api, request_id: str, accept: str = "application/json") -> httpx.Response:
    return await server.post("/api/v1/retrieve_future", {"request_id": request_id}, headers={"accept": accept})


async def announce(server: Api, *, sees: bool = False) -> None:
    """A heartbeat of a service, which outlives a busy machine's reading of a large body."""
    await server.ring.learners.announce(ServiceCard(id="s", model=MODEL, max_rank=8, max_learners=4, sees=sees))
    await server.ring.redis.expire(keys.learner_service(MODEL), int(NEVER_S))


async def made(server: Api, **metadata: str) -> str:
    """A learner that waits for its service."""
    await announce(server)
    session = (await ask(server, "create_session", tags=[], user_metadata=None, sdk_version="x"))["session_id"]
    lora = {"rank": 8, "seed": 3}
    asked = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "user_metadata": metadata}
    placed = await ask(server, "create_model", **asked, lora_config=lora)
    assert placed["request_id"] == f"{session}:train:0:0"
    return str(placed["model_id"])


def json_pass(learner: str, **inputs: Any) -> dict[str, Any]:
    tensors = {
        name: {"data": values, "dtype": "int64" if name == "target_tokens" else "float32"}
        for name, values in (inputs or TARGETS).items()
    }
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}, "loss_fn_inputs": tensors}
    return {"model_id": learner, "seq_id": 1, "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}}


def binary_pass(learner: str, **changes: Any) -> bytes:
    message = MESSAGE["ForwardBackwardRequest"](model_id=learner, seq_id=1, loss_fn="cross_entropy", **changes)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([5, 6], "<i4").tobytes()
    targets = datum.loss_fn_inputs.add(key="target_tokens").value
    targets.dense, targets.dtype = np.array([6, 7], "<i8").tobytes(), 2
    weights = datum.loss_fn_inputs.add(key="weights").value
    weights.dtype = 1
    weights.shape.extend([2])
    weights.dense = np.array([0, 1], "<f4").tobytes()
    encoded: bytes = message.SerializeToString()
    return encoded


async def test_a_pass_is_the_same_as_json_and_as_protobuf_and_is_placed_once(server: Api) -> None:
    learner = await made(server)
    first = await ask(server, "forward_backward", **json_pass(learner))
    content = binary_pass(learner)
    again = await server.http.post("/api/v1/forward_backward", content=content, headers=PROTOBUF)
    assert again.json() == first == {"request_id": f"{learner}:1", "model_id": learner}
    found = await server.ring.learners.request(learner, 2)
    assert found is not None and isinstance(found[0], PassRequest)
    given, (datum,) = read_pass(content), found[0].data
    assert [datum.tokens] == given.data[0].pieces and datum.inputs == given.data[0].inputs
    assert found[0].backward and not read_pass(binary_pass(learner, forward_only=True)).backward
    begin = await server.ring.learners.request(learner, 1)
    assert begin is not None and begin[0] == BeginRequest()


async def test_results_come_by_polls_in_the_form_that_is_asked_for(
    server: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.tinker.futures.POLL_S", 0.01)
    learner = await made(server)
    waiting = await future(server, f"{learner}:0")
    assert waiting.status_code == 408 and waiting.json()["type"] == "try_again"
    for number, path in enumerate(("forward_backward", "optim_step", "save_weights_for_sampler"), 1):
        extra = (
            json_pass(learner)
            if number == 1
            else {"adam_params": {}}
            if number == 2
            else {"sampling_session_seq_id": 4}
        )
        await ask(server, path, **{**extra, "model_id": learner, "seq_id": number})
    store = server.ring.learners
    held = await store.take(learner)
    assert held is not None and held.spec.rank == 8 and held.spec.scale == 4.0 and held.spec.seed == 3
    logprobs = np.array([-1.5, -2.5], np.float32)
    done = PassDone(({"logprobs": Values.of(logprobs)}, {"logprobs": Values.of(logprobs[:1])}), {"loss:sum": 2.5})
    answers = (BeginDone(), done, StepDone({"step:max": 1.0}), SaveDone("000003", "sampler", 7))
    for number, answer in enumerate(answers, 1):
        assert await store.put_answer(held, number, answer)
    assert (await future(server, f"{learner}:0")).json() == {"type": "create_model", "model_id": learner}
    shown = (await future(server, f"{learner}:1")).json()
    assert shown["loss_fn_outputs"][0]["logprobs"] == {"data": [-1.5, -2.5], "dtype": "float32", "shape": [2]}
    binary = await future(server, f"{learner}:1", PROTOBUF["content-type"])
    message = MESSAGE["ForwardBackwardOutput"]()
    message.ParseFromString(binary.content)
    (record,) = message.loss_fn_outputs
    assert record.num_datums == 2 and np.frombuffer(record.fields[0].value.offsets, "<i8").tolist() == [0, 8, 12]
    assert np.frombuffer(record.fields[0].value.data, "<f4").tolist() == [-1.5, -2.5, -1.5]
    assert (await future(server, f"{learner}:2")).json() == {"metrics": {"step:max": 1.0}}
    session = learner.partition(":")[0]
    saved = (await future(server, f"{learner}:3:4")).json()
    assert saved["path"] == f"tinker://{learner}/sampler_weights/000003"
    assert saved["sampling_session_id"] == f"{session}:sample:4"
    sampler = (await server.http.get(f"/api/v1/samplers/{session}:sample:4")).json()
    assert sampler["model_path"] == saved["path"]
    await ask(server, "optim_step", model_id=learner, seq_id=4, adam_params={"learning_rate": 0.1})
    assert await store.request(learner, 5) == (StepRequest(learning_rate=0.1), pytest.approx(90, abs=60))
    assert await store.put_answer(held, 5, RequestFailed("no step"))
    assert (await future(server, f"{learner}:4")).json() == {"error": "no step", "category": "user"}
    await server.ring.redis.delete(keys.learner_answer(learner, 5))
    assert (await future(server, f"{learner}:4")).status_code == 410


async def test_a_sample_is_drawn_once_and_gone_with_its_api_process(server: Api) -> None:
    session = (await ask(server, "create_session", tags=[], user_metadata={}, sdk_version="x"))["session_id"]
    made = await ask(server, "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL)
    sampler = made["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    params = {"max_tokens": 8, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop": None}
    body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 2, "prompt": prompt, "sampling_params": params}
    more = {"prompt_logprobs": True, "topk_sample_logprobs": 1, "topk_prompt_logprobs": 0, "type": "sample"}
    first, again = [await ask(server, "asample", **body, **more) for _ in range(2)]
    assert first == again and len(first["sample_sequence_ids"]) == 2
    answer = await future(server, first["request_id"])
    message = MESSAGE["SampleResponse"]()
    message.ParseFromString(answer.content)
    assert len(message.sequences) == 2 and message.sequences[0].stop_reason == 0
    assert len(message.sequences[0].tokens) == len(message.sequences[0].logprobs) > 0
    assert message.sequences[0].topk_sampled_logprobs.k == 1
    keeper = keys.keeper("tinker of ")
    await server.ring.tinker.put(keeper, f"{sampler}:sample:9", TinkerSample("dead-api"))
    assert (await future(server, f"{sampler}:sample:9")).status_code == 410
    await server.ring.tinker.put(keeper, f"{sampler}:sample:8", TinkerSample("x", "failed", error="no", fault="server"))
    assert (await future(server, f"{sampler}:sample:8")).json() == {"error": "no", "category": "server"}
    await ask(server, "cancel_future", request_id=first["request_id"])
    assert (await future(server, first["request_id"])).status_code == 410


async def test_an_inflight_sampler_draws_each_sample_from_the_latest_version(server: Api, worker: Any) -> None:
    learner = await made(server)
    spec = await server.ring.learners.spec(learner)
    asked = {"model_id": learner, "seq_id": 1, "sampling_session_seq_id": 0, "kind": "inflight"}
    placed = await ask(server, "save_weights_for_sampler", **asked)
    first = await publish(server.ring.adapters, spec.adapter, seed=1)
    held = await server.ring.learners.take(learner)
    assert held is not None
    for number, answer in enumerate((BeginDone(), SaveDone("000001", "sampler", first.version)), 1):
        assert await server.ring.learners.put_answer(held, number, answer)
    sampler = (await future(server, placed["request_id"])).json()["sampling_session_id"]
    assert sampler == f"{learner.partition(':')[0]}:sample:0"
    drawn = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "sampling_params": {"max_tokens": 2}}
    for number in range(2):
        latest = await publish(server.ring.adapters, spec.adapter, seed=2) if number else first
        begun = await ask(server, "asample", sampling_session_id=sampler, seq_id=number, **drawn)
        assert (await future(server, begun["request_id"])).status_code == 200
        assert worker.specs[-1].adapter == latest.id


async def test_a_cancelled_sample_ends_at_the_worker(server: Api, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "script", lambda spec: Answer("a long answer", hold_at=1))
    session = (await ask(server, "create_session", tags=[], user_metadata=None, sdk_version="x"))["session_id"]
    made = await ask(server, "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL)
    prompt = {"chunks": [{"tokens": [5]}]}
    body = {"sampling_session_id": made["sampling_session_id"], "seq_id": 0, "prompt": prompt}
    begun = await ask(server, "asample", **body, sampling_params={"max_tokens": 8})
    await wait_until(lambda: bool(worker.specs))
    await ask(server, "cancel_future", request_id=begun["request_id"])
    await wait_until(lambda: bool(worker.cancelled))


async def test_what_cannot_be_done_is_refused_by_name(server: Api) -> None:
    learner = await made(server)
    session = learner.partition(":")[0]
    unknown = json_pass(learner)
    unknown["forward_backward_input"]["loss_fn"] = "x"
    wrong: dict[str, tuple[str, dict[str, Any]]] = {
        "data[0]": ("forward_backward", json_pass(learner, target_tokens=[6], weights=[1.0])),
        "data": ("forward", {**json_pass(learner), "forward_backward_input": {"data": [], "loss_fn": "ppo"}}),
        "loss_fn": ("forward", unknown),
        "lora_config": (
            "create_model",
            {"session_id": session, "model_seq_id": 1, "base_model": MODEL, "lora_config": {"rank": 9}},
        ),
        "optimizer_config": (
            "create_model",
            {"session_id": session, "model_seq_id": 1, "base_model": MODEL, "optimizer_config": {"type": "dimuon"}},
        ),
        "user_metadata.lora_kind": (
            "create_model",
            {"session_id": session, "model_seq_id": 1, "base_model": MODEL, "user_metadata": {"lora_kind": "DoRA"}},
        ),
        "kind": ("save_weights_for_sampler", {"model_id": learner, "seq_id": 1, "kind": "inflight", "path": "a"}),
        "path": ("load_weights", {"model_id": learner, "seq_id": 1, "path": "tinker://x", "optimizer": True}),
        "adam_params.beta1": ("optim_step", {"model_id": learner, "seq_id": 1, "adam_params": {"beta1": 1.0}}),
    }
    wrong["model_input"] = ("forward_backward", json_pass(learner))
    wrong["model_input"][1]["forward_backward_input"]["data"][0]["model_input"]["chunks"][0]["tokens"] = [2**64, 6]
    for name, body in (
        ("seq_id", {"model_id": learner, "seq_id": 0, "adam_params": {}}),  # number 1 is what makes it
        ("user_metadata", {"session_id": session, "model_seq_id": 1, "base_model": MODEL}),
        ("loss_fn_inputs", json_pass(learner)),
    ):
        wrong[name] = ({"seq_id": "optim_step", "user_metadata": "create_model"}.get(name, "forward"), body)
    wrong["user_metadata"][1]["user_metadata"] = {"a": "x" * 20_000}
    gigabytes = {"data": [], "dtype": "int64", "shape": [1, 2**22 + 1], "sparse_crow_indices": [0, 0]}
    sparse = wrong["loss_fn_inputs"][1]["forward_backward_input"]["data"][0]
    sparse["loss_fn_inputs"] = {name: {**gigabytes, "sparse_col_indices": []} for name in ("target_tokens", "weights")}
    for param, (path, body) in wrong.items():
        answer = await server.post(f"/api/v1/{path}", body)
        assert answer.status_code == 400, (param, answer.text)
        assert param.split("[")[0] in str(answer.json()["error"]["param"]), (param, answer.text)
    junk = await server.http.post("/api/v1/forward_backward", content=b"\xff\xff", headers=PROTOBUF)
    assert junk.status_code == 400, junk.text
    zstd = {**PROTOBUF, "content-encoding": "zstd"}
    packed = await server.http.post("/api/v1/forward_backward", content=b"x", headers=zstd)
    assert packed.status_code == 400 and "compressed" in packed.text
    for shape, crow in (([-1, 5], []), ([1, 2**23 + 1], [0, 0]), ([2**40, 2**40], [0])):
        message = MESSAGE["ForwardBackwardRequest"]()
        message.ParseFromString(binary_pass(learner))
        tensor = message.data[0].loss_fn_inputs[0].value
        tensor.ClearField("dense")
        tensor.sparse_csr.crow_indices = np.array(crow, "<i8").tobytes()
        tensor.shape.extend(shape)
        content = message.SerializeToString()
        answer = await server.http.post("/api/v1/forward_backward", content=content, headers=PROTOBUF)
        assert answer.status_code == 400, answer.text
    for number in (0, -5):
        content = binary_pass(learner)
        content = content.replace(
            b"\x10\x01", b"\x10" + (b"\x00" if number == 0 else b"\xfb" + b"\xff" * 8 + b"\x01"), 1
        )
        answer = await server.http.post("/api/v1/forward_backward", content=content, headers=PROTOBUF)
        assert answer.status_code == 400 and "1 or more" in answer.text
    sampled = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = (await ask(server, "create_sampling_session", **sampled))["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    await ask(
        server, "asample", 400, sampling_session_id=sampler, seq_id=0, prompt=prompt, sampling_params={"stop": ""}
    )
    placed = await server.ring.learners.request(learner, 2)
    assert placed is not None and isinstance(placed[0], RefusedRequest)
    sound = MESSAGE["ForwardBackwardRequest"](model_id=learner, loss_fn="ppo")
    sound.data.add().model_input.add().dmel.SetInParent()
    with pytest.raises(InvalidRequestError, match="no text"):
        read_pass(sound.SerializeToString())
    shown = MESSAGE["ForwardBackwardRequest"]()
    shown.ParseFromString(binary_pass(learner))
    shown.data[0].model_input.add().image.data = b"a file"
    shown.seq_id = 2
    blind = await server.http.post("/api/v1/forward_backward", content=shown.SerializeToString(), headers=PROTOBUF)
    assert blind.status_code == 400 and "takes no images" in blind.text
    shown.data[0].model_input[1].image.override_dimensions.SetInParent()
    with pytest.raises(InvalidRequestError, match="its own size"):
        read_pass(shown.SerializeToString())


async def test_a_refused_request_has_its_place_so_that_what_comes_after_it_is_carried_out(server: Api) -> None:
    """Tinker's SDK counts on after a refusal: a number that nobody placed would be waited for, for ever."""
    learner = await made(server)
    wrong = json_pass(learner, target_tokens=[6, 10**6], weights=[0.0, 1.0])
    binary = binary_pass(learner).replace(b"\x06\x00\x00\x00", b"\xff\xff\xff\x7f", 1)
    passes = {"forward_backward": "pass", "forward": "other", "protobuf": "pass", "protobuf forward": "other"}
    refused: dict[str, Any] = {
        "forward_backward": wrong,
        "forward": wrong,
        "protobuf": binary,
        "protobuf forward": binary + b"\x30\x01",
        "too many items": binary + b"\x1a\x00" * 300_000,
        "too long": binary + b"\x00" * (64 << 20),
        "deep": {**json_pass(learner), "loss": [[]] * 2_000_000},
        "optim_step": {"adam_params": {"beta1": 1.0}},
        "save_weights": {"path": "a/b"},
        "save_weights_for_sampler": {"path": "a", "kind": "inflight"},
        "save_weights_external": {"path": "a", "age_encryption_recipients": ["x"]},
        "load_weights": {"path": f"tinker://{learner}/weights/nowhere", "optimizer": True},
    }
    for at, (name, body) in enumerate(refused.items(), 1):
        if isinstance(body, bytes):
            content = body.replace(b"\x10\x01", bytes([0x10, at]), 1)
            answer = await server.http.post("/api/v1/forward_backward", content=content, headers=PROTOBUF)
        else:
            path = "forward_backward" if name == "deep" else name
            answer = await server.post(f"/api/v1/{path}", {**body, "model_id": learner, "seq_id": at})
        assert 400 <= answer.status_code < 500, (name, answer.text)
        found = await server.ring.learners.request(learner, at + 1)
        assert found is not None and isinstance(found[0], RefusedRequest), name
        of = {**passes, "optim_step": "step"}.get(name, "pass" if at < 8 else "other")
        assert (found[0].message, found[0].of) == (answer.json()["error"]["message"], of), name
    assert not (await ask(server, "client/config"))["parallel_fwdbwd_chunks"], "or parts of a pass would not be sent"
    placed = await ask(server, "optim_step", model_id=learner, seq_id=len(refused) + 1, adam_params={})
    assert placed["request_id"] == f"{learner}:{len(refused) + 1}"


async def test_a_refusal_takes_no_place_of_a_learner_that_is_somebody_else_s(server: Api) -> None:
    learner = await made(server)
    spec = msgspec.structs.replace(await server.ring.learners.spec(learner), id="theirs", keeper="theirs")
    await server.ring.learners.create(spec)
    await ask(server, "optim_step", 400, model_id="theirs", seq_id=1, adam_params={"beta1": 1.0})
    await ask(server, "optim_step", 404, model_id="theirs", seq_id=1, adam_params={})
    assert not await server.ring.learners.waits("theirs", 2)


async def test_questions_about_a_prompt_s_tokens_that_do_not_fit_it_are_refused_by_name(server: Api) -> None:
    session = (await ask(server, "create_session", tags=[], user_metadata=None, sdk_version="x"))["session_id"]
    made = await ask(server, "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    body = {"sampling_session_id": made["sampling_session_id"], "seq_id": 0, "prompt": prompt, "prompt_logprobs": True}

    def targets(data: list[Any], shape: list[int] | None = None, **more: Any) -> dict[str, Any]:
        given = {"data": data, "dtype": "int64", "shape": [2, 1] if shape is None else shape, **more}
        return {"target_prompt_logprobs": given}

    csr = {"sparse_crow_indices": [0, 1, 1], "sparse_col_indices": [0]}
    wrong: list[dict[str, Any]] = [
        {"prompt_logprobs_last_n": 3},
        {"prompt_logprobs_last_n": 0},
        {"prompt_logprobs_last_n": 1, "prompt_logprobs": False},
        {"prompt_alt_tokens_k": -1},
        {"prompt_alt_tokens_k": 21},
        targets([5, 6, 7], [3, 1]),
        targets([5, 6, 7]),
        targets([5, 6], []),
        targets([0.5, 6.0], dtype="float32"),
        targets([0.5, 6.0]),
        targets([5, -2]),
        targets([5, 10**9]),
        targets([5, 2**70]),
        targets([5], **{**csr, "sparse_col_indices": [1]}),
        targets([5], **{**csr, "sparse_col_indices": [0, 0]}),
        targets([5], **{**csr, "sparse_crow_indices": [0, 2, 1]}),
        targets([5], **{**csr, "sparse_crow_indices": [0, 1]}),
        targets([5], sparse_crow_indices=[0, 1, 1]),
        targets([5], [2, 2**30], **{**csr, "sparse_col_indices": [2**30]}),
    ]
    for fields in wrong:
        name = next(iter(fields))
        answer = await server.post("/api/v1/asample", {**body, "sampling_params": {"max_tokens": 1}, **fields})
        assert answer.status_code == 400, (fields, answer.text)
        assert name.split("_")[0] in str(answer.json()["error"]), (fields, answer.text)
    for chunk in (
        {"type": "image", "data": "QUJD", "format": "png"},
        {"type": "image_asset_pointer", "location": "https://a.example/b.png", "format": "png"},
        {"type": "image", "format": "png"},
        {"type": "dmel", "dmel": "QUJD"},
        {"type": "encoded_text"},
    ):
        shown = {**body, "prompt_logprobs": False, "prompt": {"chunks": [chunk]}}
        answer = await server.post("/api/v1/asample", {**shown, "sampling_params": {"max_tokens": 1}})
        assert answer.status_code == 400, (chunk, answer.text)


async def test_a_save_makes_a_learner_of_its_shape(server: Api) -> None:
    learner = await made(server, lora_kind="dora")
    session = learner.partition(":")[0]
    path = f"tinker://{learner}/weights/a"
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False}
    assert (await server.post("/api/v1/load_weights", body)).status_code == 404
    held = await server.ring.learners.take(learner)
    assert held is not None
    info = SaveInfo(name="a", kind="state", created_ms=1, expires_ms=2**41)
    assert await server.ring.learners.put_answer(held, 1, SaveDone("a", "state"), save=info)
    other = await server.post("/api/v1/load_weights", {**body, "user_metadata": {"lora_kind": "lora"}})
    assert other.status_code == 400 and "of kind 'dora'" in other.text
    placed = await ask(server, "load_weights", **body)
    assert placed["request_id"] == f"{session}:train:1:0"
    first = await server.ring.learners.request(f"{session}:train:1", 1)
    assert first is not None and first[0] == LoadRequest(learner, "a", optimizer=False)
    spec = await server.ring.learners.spec(f"{session}:train:1")
    assert (spec.rank, spec.scale, spec.kind) == (8, 4.0, "dora")
    runs = (await server.http.get("/api/v1/training_runs")).json()
    assert [each["training_run_id"] for each in runs["training_runs"]] == [f"{session}:train:1", learner]
    listed = (await server.http.get(f"/api/v1/training_runs/{learner}/checkpoints")).json()["checkpoints"]
    assert [each["checkpoint_id"] for each in listed] == ["weights/a"]
    ttl = await server.http.put(f"/api/v1/training_runs/{learner}/checkpoints/weights/a/ttl", json={"ttl_seconds": 60})
    assert ttl.status_code == 200
    gone = await server.http.delete(f"/api/v1/training_runs/{learner}/checkpoints/weights/a")
    assert gone.status_code == 200
    assert (await server.http.get("/api/v1/checkpoints")).json()["checkpoints"] == []


async def test_without_a_service_nothing_is_trained(server: Api, redis: Redis) -> None:
    session = (await ask(server, "create_session", tags=[], user_metadata=None, sdk_version="x"))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL}
    answer = await server.post("/api/v1/create_model", body)
    assert answer.status_code == 503 and "mlx_parallm_learners" in answer.text
    shown = (await server.http.get("/api/v1/get_server_capabilities")).json()["supported_models"]
    assert [(each["model_name"], each["trainable"]) for each in shown] == [(MODEL, False)]
    await ask(server, "session_heartbeat", session_id=session)
    await ask(server, f"sessions/{session}/finish")
    await ask(server, "session_heartbeat", 410, session_id=session)


def test_any_key_of_ours_may_stand_behind_tinker_s_prefix() -> None:
    ring = KeyRing.of(ApiSettings(api_key="plm-a-key-of-ours,tml-a-key-of-its-own"))  # type: ignore[arg-type]
    for key in ("plm-a-key-of-ours", "tml-plm-a-key-of-ours", "tml-a-key-of-its-own"):
        assert ring.find(key) is not None, key
    for key in ("tml-tml-plm-a-key-of-ours", "a-key-of-ours", "tml-"):
        assert ring.find(key) is None, key


@pytest.fixture
async def seeing(server: Api, monkeypatch: pytest.MonkeyPatch) -> Api:
    """The api of a model that sees."""
    card, codec = await server.ring.known(MODEL)
    card = msgspec.structs.replace(card, vision=VisionSpec("pixtral", "[IMG]", 9, 8, 128, 1))

    async def known(name: str) -> Any:
        return card, codec

    monkeypatch.setattr(server.ring, "known", known)
    return server


async def shown_pass(server: Api, learner: str, *chunks: dict[str, Any], number: int = 1) -> httpx.Response:
    body = {**json_pass(learner), "seq_id": number}
    body["forward_backward_input"]["data"][0]["model_input"]["chunks"] += chunks
    return await server.post("/api/v1/forward_backward", body)


async def test_a_pass_too_long_is_refused_before_its_images_are_looked_at(seeing: Api) -> None:
    learner = await made(seeing)
    await announce(seeing, sees=True)
    many = {"type": "encoded_text", "tokens": [5] * (1 << 20)}
    damaged = {"type": "image", "data": "AAAA", "format": "png"}
    answer = await shown_pass(seeing, learner, damaged, many)
    assert answer.status_code == 400 and "takes up to" in answer.text
    message = MESSAGE["ForwardBackwardRequest"](model_id=learner, seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    for _ in range(4097):
        datum.model_input.add().encoded_text.tokens = b""
    with pytest.raises(InvalidRequestError, match="4097 chunks"):
        read_pass(message.SerializeToString())


async def test_a_pass_fetches_a_url_once_and_takes_so_many_bytes_of_images(
    seeing: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, fetched = await made(seeing), list[str]()
    await announce(seeing, sees=True)

    async def get(url: str) -> bytes:
        fetched.append(url)
        return f"{url:>2000}".encode()

    async def checked(data: bytes) -> tuple[bytes, tuple[int, int]]:
        return data[-8:], (8, 8)

    monkeypatch.setattr(seeing.ring.image_fetch, "get", get)
    monkeypatch.setattr(seeing.ring.images, "checked", checked)
    monkeypatch.setattr("api.tinker.training.MOST_FILE_BYTES", 5000)
    pointers = [{"type": "image_asset_pointer", "location": f"https://a.example/{at}.png"} for at in (0, 1, 0, 1, 2)]
    answer = await shown_pass(seeing, learner, *pointers[:4])
    assert "of files" not in answer.text and len(fetched) == 2
    answer = await shown_pass(seeing, learner, *pointers, number=2)
    assert answer.status_code == 400 and "of files" in answer.text and len(fetched) == 5


async def test_a_pass_with_images_waits_for_a_service_that_is_known(seeing: Api, redis: Redis) -> None:
    learner = await made(seeing)
    await redis.delete(keys.learner_service(MODEL))
    answer = await shown_pass(seeing, learner, {"type": "image", "data": "AAAA"})
    assert answer.status_code == 503 and "no training service" in answer.text


def test_a_service_from_before_images_cannot_read_a_pass_that_has_some() -> None:
    files = {b"a": b"b"}
    request = msgspec.msgpack.encode(ImagePassRequest((), "cross_entropy", files=files))
    assert msgspec.msgpack.decode(request, type=Request) == ImagePassRequest((), "cross_entropy", files=files)
    with pytest.raises(msgspec.ValidationError, match="seen_pass"):
        msgspec.msgpack.decode(request, type=BeginRequest | PassRequest | StepRequest)


async def test_what_was_accepted_stays_so_when_its_image_is_gone(seeing: Api) -> None:
    learner = await made(seeing)
    await ask(seeing, "forward_backward", **json_pass(learner))
    gone = {"type": "image_asset_pointer", "location": "https://gone.example/a.png"}
    answer = await shown_pass(seeing, learner, gone)
    assert answer.status_code == 200 and answer.json()["request_id"] == f"{learner}:1"
    named = {"session_id": learner.partition(":")[0], "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = (await ask(seeing, "create_sampling_session", **named))["sampling_session_id"]
    sample = {"sampling_session_id": sampler, "seq_id": 0, "sampling_params": {"max_tokens": 1}}
    first = await ask(seeing, "asample", **sample, prompt={"chunks": [{"type": "encoded_text", "tokens": [5]}]})
    assert await ask(seeing, "asample", **sample, prompt={"chunks": [gone]}) == first
    assert "error" in await ask(seeing, "asample", 400, **{**sample, "seq_id": 1}, prompt={"chunks": [gone]})


async def test_targets_that_ask_for_nothing_are_told_as_zeros(server: Api) -> None:
    session = (await ask(server, "create_session", tags=[], user_metadata=None, sdk_version="x"))["session_id"]
    made = await ask(server, "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL)
    named = {"sampling_session_id": made["sampling_session_id"], "seq_id": 0, "sampling_params": {"max_tokens": 8}}
    targets = {"data": [-1, -1, -1, -1], "dtype": "int64", "shape": [2, 2]}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    begun = await ask(server, "asample", **named, prompt=prompt, target_prompt_logprobs=targets)

    async def done() -> bool:
        return (await future(server, begun["request_id"])).status_code != 408

    await wait_until(done)
    message = MESSAGE["SampleResponse"]()
    message.ParseFromString((await future(server, begun["request_id"], PROTOBUF["content-type"])).content)
    told = message.target_prompt_logprobs
    assert list(told.shape) == [2, 2] and np.frombuffer(told.dense, "<f4").tolist() == [0.0] * 4
