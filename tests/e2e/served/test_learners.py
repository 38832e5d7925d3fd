"""The training service: kill -9 in the midst of passes and steps, takeover, sampling from what was learned."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator

import httpx
import numpy as np

from shared.learners import (
    Answer,
    Datum,
    Failed,
    LearnerSpec,
    Load,
    LoadDone,
    Pass,
    PassDone,
    Publish,
    Request,
    Save,
    SaveDone,
    Step,
    StepDone,
    Values,
)
from shared.redis.connection.client import connect
from shared.redis.training.learner_store import LearnerStore
from tests.e2e.rings import MODEL, Process, Ring

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
        asked += [Pass(chats(2 * turn), "cross_entropy"), Pass(chats(2 * turn + 1), "cross_entropy")]
        asked.append(Step(learning_rate=0.003))
    return [*asked, Save("end")]


async def answered(store: LearnerStore, learner: str, number: int) -> Answer:
    answer = await store.answer(learner, number, 90)
    assert answer is not None, f"request {number} of {learner} was not answered"
    return answer


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
                    Pass((Datum(b"\1\0\0\0", {}),), "cross_entropy"),  # refused, which hurts nobody
                    Step(),  # and what it was to bring is not left out in silence
                    Load("whole", "end"),
                    Publish("v1", ttl_s=3600),
                ]
                for number, request in enumerate(more, at + 1):
                    await store.place(specs["killed"], number, request)
                said = [await answered(store, "killed", number) for number in range(at + 1, at + 5)]
                assert [type(each) for each in said] == [Failed, Failed, LoadDone, SaveDone]
                assert isinstance(said[3], SaveDone) and said[3].version == 1
                assert [info.name for info in await store.saves("killed")] == ["end", "v1"]
                assert (await store.service(MODEL)) is not None
                assert running.stop() == 0
                held = await store.take("killed")
                assert held is not None and held.applied == held.done == at + 4, "what was learned is stored at the end"

    asyncio.run(play())
    body = {"model": "killed@1", "prompt": "What is 1 + 2?", "max_tokens": 2}
    assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).status_code == 200
