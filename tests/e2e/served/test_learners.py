"""The training service: kill -9 in the midst of passes and steps, takeover, sampling from what was learned."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np

from shared.learners import (
    Answer,
    Datum,
    LearnerSpec,
    LoadDone,
    LoadRequest,
    PassDone,
    PassRequest,
    PublishRequest,
    Request,
    RequestFailed,
    SaveDone,
    SaveRequest,
    StepDone,
    StepRequest,
    Values,
)
from shared.redis.connection.client import connect
from shared.redis.training.learner_store import LearnerStore
from tests.e2e.rings import MODEL, Process, Ring
from tests.waiting import HANG_S

ROUNDS = 8


@contextlib.contextmanager
def service(served: Ring) -> Iterator[Process]:
    arguments = ("--redis", served.redis_url, "--model", f"models/{MODEL}", "--log-json", "true")
    process = Process.start("trainer.service", *arguments, "--state-every", "5")
    try:
        yield process
    finally:
        process.stop()


def chats(seed: int) -> tuple[Datum, ...]:
    draw = np.random.default_rng(seed)

    def datum() -> Datum:
        ids = draw.integers(3, 400, 25)
        inputs = {"target_tokens": Values.of(ids[1:]), "weights": Values.of(np.ones(24, np.float32))}
        return Datum(ids[:-1].astype("<i4").tobytes(), inputs)

    return tuple(datum() for _ in range(16))


def lessons() -> list[Request]:
    """Of each round two passes and a step; then the state is saved."""
    asked: list[Request] = []
    for turn in range(ROUNDS):
        asked += [PassRequest(chats(2 * turn), "cross_entropy"), PassRequest(chats(2 * turn + 1), "cross_entropy")]
        asked.append(StepRequest(learning_rate=0.003))
    return [*asked, SaveRequest("end")]


async def answered(store: LearnerStore, learner: str, number: int) -> Answer:
    answer = await store.answer(learner, number, HANG_S)
    assert answer is not None, f"request {number} of {learner} was not answered"
    return answer


def ask(served: Ring, route: str, **body: Any) -> Any:
    answer = httpx.post(f"{served.url}/api/v1/{route}", json=body, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def result(served: Ring, request_id: str) -> httpx.Response:
    """Of what was asked, as a client waits for it."""
    while True:
        answer = httpx.post(f"{served.url}/api/v1/retrieve_future", json={"request_id": request_id}, timeout=HANG_S)
        if answer.status_code != 408:
            assert answer.status_code == 200, answer.text
            return answer


def learn_over_http(served: Ring) -> None:
    """As Tinker's SDK does: some steps of a DoRA on one text, a sampler, what it says. It has not said that before."""
    session = ask(served, "create_session", tags=[], user_metadata=None, sdk_version="0")["session_id"]
    wanted = {"base_model": MODEL, "lora_config": {"rank": 8, "seed": 1}, "user_metadata": {"lora_kind": "dora"}}
    made = ask(served, "create_model", session_id=session, model_seq_id=0, **wanted)
    learner = made["model_id"]
    ids, answer = [25, 30, 40, 50], [23, 21, 24]  # digits
    weights = {"data": [0.0] * 3 + [1.0] * 3, "dtype": "float32"}
    targets = {"data": (ids + answer)[1:], "dtype": "int64"}
    chunks = [{"type": "encoded_text", "tokens": (ids + answer)[:-1]}]
    datum = {"model_input": {"chunks": chunks}, "loss_fn_inputs": {"target_tokens": targets, "weights": weights}}
    passed = {"data": [datum], "loss_fn": "cross_entropy"}
    for step in range(20):
        ask(served, "forward_backward", model_id=learner, seq_id=2 * step + 1, forward_backward_input=passed)
        adam = {"learning_rate": 0.005}
        ask(served, "optim_step", model_id=learner, seq_id=2 * step + 2, adam_params=adam)
    # What is refused is failed: the step after a refused pass changes nothing, and what comes then goes on.
    wrong = {**datum, "model_input": {"chunks": [{"type": "encoded_text", "tokens": [10**6] * 6}]}}
    body = {"model_id": learner, "seq_id": 41, "forward_backward_input": {**passed, "data": [wrong]}}
    assert httpx.post(f"{served.url}/api/v1/forward_backward", json=body, timeout=HANG_S).status_code == 400
    ask(served, "optim_step", model_id=learner, seq_id=42, adam_params={"learning_rate": 0.005})
    last = ask(served, "save_weights_for_sampler", model_id=learner, seq_id=43, sampling_session_seq_id=0)
    for number, words in ((41, "token id outside"), (42, "a pass since the last one has failed")):
        failed = result(served, f"{learner}:{number}").json()
        assert words in failed["error"] and failed["category"] == "user", failed
    losses = [result(served, f"{learner}:{number}").json()["metrics"]["loss:sum"] for number in (1, 39)]
    assert losses[1] < 0.1 * losses[0], losses
    sampler = result(served, last["request_id"]).json()["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": ids}]}
    params = {"max_tokens": 3, "temperature": 0, "stop": []}
    sample = ask(served, "asample", sampling_session_id=sampler, seq_id=0, prompt=prompt, sampling_params=params)
    said = result(served, sample["request_id"]).content
    assert np.array(answer, "<i4").tobytes() in said, "the tokens stand in the protobuf as they are"


def test_killed_services_lose_and_double_no_step(served: Ring) -> None:
    async def play() -> None:
        async with contextlib.aclosing(connect(served.redis_url)) as redis:
            store = LearnerStore(redis)
            specs = {
                name: LearnerSpec(id=name, model=MODEL, rank=4, scale=8.0, seed=1, adapter=name, owner="")
                for name in ("killed", "whole")
            }
            for spec in specs.values():
                await store.create(spec)
            asked = lessons()
            for number, request in enumerate(asked, 1):
                await store.place(specs["killed"], number, request)
            first: dict[int, Answer] = {}
            for kill in (7, 18):  # with the answer before it read, the service is in the midst of a request
                with service(served) as running:
                    first[kill] = await answered(store, "killed", kill)
                    running.stop(signal.SIGKILL)
            with service(served) as running:
                for number, request in enumerate(asked, 1):
                    await store.place(specs["killed"], number, request)  # again, as a client that was told nothing
                    await store.place(specs["whole"], number, request)
                answers = {
                    name: [await answered(store, name, number) for number in range(1, len(asked) + 1)] for name in specs
                }
                assert answers["killed"] == answers["whole"]
                assert [answers["killed"][kill - 1] for kill in first] == list(first.values()), "answers stay"
                steps = [each.metrics["step:max"] for each in answers["killed"] if isinstance(each, StepDone)]
                assert steps == list(range(1, ROUNDS + 1))
                assert await store.saved("killed", "end") == await store.saved("whole", "end")
                losses = [each.metrics["loss:sum"] for each in answers["whole"] if isinstance(each, PassDone)]
                assert losses[-1] < losses[0]

                at = len(asked)
                more: list[Request] = [
                    PassRequest((Datum(b"\1\0\0\0", {}),), "cross_entropy"),  # refused, which hurts nobody
                    StepRequest(),  # and what it was to bring is not left out in silence
                    LoadRequest("whole", "end"),
                    PublishRequest("v1", ttl_s=3600),
                ]
                for number, request in enumerate(more, at + 1):
                    await store.place(specs["killed"], number, request)
                said = [await answered(store, "killed", number) for number in range(at + 1, at + 5)]
                assert [type(each) for each in said] == [RequestFailed, RequestFailed, LoadDone, SaveDone]
                assert isinstance(said[3], SaveDone) and said[3].version == 1
                assert [info.name for info in await store.saves("killed")] == ["end", "v1"]
                assert (await store.service(MODEL)) is not None
                await asyncio.to_thread(learn_over_http, served)
                assert running.stop() == 0
                held = await store.take("killed")
                assert held is not None and held.applied == held.done == at + 4, "what was learned is stored at the end"

    asyncio.run(play())
    body = {"model": "killed@1", "prompt": "What is 1 + 2?", "max_tokens": 2}
    assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=HANG_S).status_code == 200
