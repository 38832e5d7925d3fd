"""The training service in the worker that serves: kill -9 in the midst of steps, and streams that do not notice it."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import httpx

from shared.learners import LearnerSpec, PassDone, StepDone
from shared.redis.connection.client import connect
from shared.redis.training.learner_store import LearnerStore
from tests.e2e.rings import MODEL, ring
from tests.e2e.served.test_learners import ROUNDS, answered, lessons
from tests.e2e.test_hosted import Streams
from tests.waiting import HANG_S, wait_until


async def test_a_worker_trains_learners_while_streams_go_on_and_a_kill_loses_no_step(tmp_path: Path) -> None:
    with ring(tmp_path, "--learners", "2", "--training-share", "0.6", "--log-json", "true") as served:
        served.server.wait_for_line(r"learners\.ready")
        async with contextlib.aclosing(connect(served.redis_url)) as redis:
            store, asked = LearnerStore(redis), lessons()
            specs = [LearnerSpec(id=id, model=MODEL, rank=4, scale=8.0, seed=1, adapter=id) for id in ("a", "b")]
            for spec in specs:
                await store.create(spec)
            streams = Streams(served.url, (MODEL,))
            async with streams.going():
                for number, request in enumerate(asked, 1):
                    await store.place(specs[0], number, request)
                first = await answered(store, "a", 7)
                (worker,) = await asyncio.to_thread(served.workers)
                os.kill(worker.pid, signal.SIGKILL)
                for number, request in enumerate(asked, 1):
                    await store.place(specs[1], number, request)
                answers = {
                    spec.id: [await answered(store, spec.id, number) for number in range(1, len(asked) + 1)]
                    for spec in specs
                }
                chats = sum(streams.answers.values())
                await wait_until(lambda: sum(streams.answers.values()) > chats)
            assert answers["a"] == answers["b"], "killed in the midst or not"
            assert answers["a"][6] == first
            steps = [each.metrics["step:max"] for each in answers["a"] if isinstance(each, StepDone)]
            assert steps == list(range(1, ROUNDS + 1))
            assert await store.saved("a", "end") == await store.saved("b", "end")
            losses = [each.metrics["loss:sum"] for each in answers["a"] if isinstance(each, PassDone)]
            assert losses[-1] < losses[0]
        assert len(streams.texts) == 1, "greedy answers of the base do not notice learners"

        async def computed() -> bool:  # told with its next heartbeat
            workers = await asyncio.to_thread(served.workers)  # the killed one's last word may be there, too
            return all(worker.extra["guest_units"] > 0 for worker in workers)

        await wait_until(computed)
        async with httpx.AsyncClient(base_url=served.url, timeout=HANG_S) as http:
            shown = (await http.get("/api/v1/get_server_capabilities")).json()["supported_models"]
        assert [each["trainable"] for each in shown] == [True]
