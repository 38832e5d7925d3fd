"""docs/operate/redis.md against a real ring: every command runs, and shows what it says."""

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from api.cli.client import InferenceClient
from shared.catalogue import CatalogueEntry, HeldModel, HostStatus
from shared.learners import BeginRequest, LearnerSpec, SaveDone, SaveInfo, ServiceCard
from shared.night import NightReport
from shared.redis import keys
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import connect
from shared.redis.processes.catalogue import CatalogueStore
from shared.redis.processes.worker_registry import WorkerRegistry
from shared.redis.training.board import TrainingBoard, ring_id
from shared.redis.training.learner_store import LearnerStore
from shared.redis.training.rounds import RoundStore
from shared.redis.training.shared_runs import SharedRun
from shared.redis.training.tinker_store import TinkerDownload, TinkerStore
from shared.training import TrainerStatus, TrainingPoint
from tests.e2e.rings import MODEL, ROOT, Ring, ring
from tests.redis.adapter_versions import publish
from tests.waiting import HANG_S, wait_until

PAGE = Path(ROOT) / "docs" / "operate" / "redis.md"
COMMANDS = re.findall(r"^\$R (.+?)\s*(?:# .*)?$", PAGE.read_text(), re.MULTILINE)
MAY_BE_EMPTY = (
    "deadletters", "XPENDING", "CONSUMERS", "SLOWLOG", "queue:batch'", ":out:", "jobs:active", "$WORKER", ":finished:",
    "batches:pending", ":pins", ":collected'", ":trajectories'", "orders", ":answer:", ":limit:", "arq:",
    ":of:acme", "parallm:children", "parallm:named:", ":due", "{completions}", ":split",
    ":live:", ":live-turn:", ":learner-service", ":images",
)  # fmt: skip
MAY_BE_ABSENT = (
    "parallm:pause",
    ":kv-folder:",
    ":suspect-turn",
    ":reap-turn",
    ":lease",
    ":history-turn",
    "{completions}",
    ":learner-service",
    ":host:",
    ":loading:",
)  # "nothing: none", as the page says


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with ring(tmp_path_factory.mktemp("ring"), "--record-ttl-s", "600", "--replay-share", "1") as started:
        yield started


@pytest.fixture
async def redis(served: Ring) -> AsyncIterator[Redis]:
    client = connect(served.redis_url)
    yield client
    await client.aclose()


async def filled(served: Ring, redis: Redis) -> dict[str, str]:
    """Something under every heading; the names that the page leaves open."""
    async with httpx.AsyncClient(base_url=served.url, timeout=HANG_S) as http:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 8, "stream": True}
        stream = await http.post("/v1/completions", json={**body, "stream_options": {"include_event_ids": True}})
        request_id = re.findall(r'"id":"(cmpl-\w+)"', stream.text)[0]
        live = {"collect_trajectory": True, "scoring_function": "exact", "metadata": {"reference": "42"}}
        whole = {"model": MODEL, "prompt": [7] * 200, "max_tokens": 2}
        assert (await http.post("/v1/completions", json={**whole, **live})).status_code == 200
        job_body = {
            "kind": "generate",
            "model": MODEL,
            "prompts": ["hello"],
            "max_tokens": 8,
            "idempotency_key": "once",
        }
        job = (await http.post("/v1/jobs", json=job_body)).json()["id"]
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {**whole, "prompt": "hello"}}
        sent = {"file": ("lines.jsonl", json.dumps(line).encode() + b"\n")}
        file = (await http.post("/v1/files", files=sent, data={"purpose": "batch"})).json()["id"]
        batch_body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=batch_body)).json()["id"]
        talk = (await http.post("/v1/conversations", json={"items": "hello"})).json()["id"]
        asked = {"model": MODEL, "input": "hello", "background": True, "stream": True, "max_output_tokens": 4}
        session = (await http.post("/api/v1/create_session", json={"tags": []})).json()["session_id"]
        said = await http.post("/v1/responses", json=asked)
        response = re.findall(r'"id":"(resp_\w+)"', said.text)[0]
    async with InferenceClient(served.url) as client:
        await client.wait(job)
    await publish(AdapterStore(redis), base="some other base")
    await AdapterStore(redis).acknowledge("w", "policy", 1)
    board = TrainingBoard(redis, "policy")
    await board.hold("owner")
    await ring_id(redis)
    await board.write(TrainerStatus(policy="policy", run="r", owner="owner"))
    await board.add(TrainingPoint(train_step=0, policy_step=1, version=1, at_ms=1))
    await board.alert("no_signal", "all rewards are equal")
    await board.put_night(NightReport(policy="policy", run="night", began_ms=1, ended_ms=2, outcome="unfinished"))
    state, saved = await learned(LearnerStore(redis), f"{session}:train:0")
    await TinkerStore(redis).note_run(keys.keeper("tinker of "), f"{session}:train:0")
    await TinkerStore(redis).put_download("digest", TinkerDownload(f"{session}:train:0", "state", "a", saved, 0))

    host = await catalogued(CatalogueStore(redis))
    part = await shared(SharedRun(redis, "policy", blocking=redis))
    average = await averaged(RoundStore(redis, "policy"))

    async def is_counted() -> bool:
        tokens = await redis.execute_command("HGET", keys.metric_totals(), f"vllm:generation_tokens_total|{MODEL}")
        seen = await redis.exists(keys.trajectories_seen("policy"))
        return float(tokens or 0) > 0 and await redis.exists(keys.history()) == 1 and seen == 1

    await wait_until(is_counted)
    apis = [key.decode() async for key in redis.scan_iter(match="parallm:api:{*}:frames")]
    [worker] = await WorkerRegistry(redis).workers(MODEL)
    card = await WorkerRegistry(redis).card(MODEL)
    assert card is not None
    return {
        "WORKER": worker.id, "JOB": job, "SEQ": f"{job}-0", "API": re.findall(r"{(.+)}", apis[0])[0], "FILE": file,
        "BATCH": batch, "REQUEST": request_id, "TOKENIZER": card.tokenizer_sha256, "KEEPER": keys.keeper(""),
        "RESPONSE": response, "TALK": talk, "LEARNER": f"{session}:train:0", "NUMBER": "1", "STATE": state,
        "SAVED": saved, "TINKER": keys.keeper("tinker of "), "SESSION": session,
        "PART": part, "AVERAGE": average, "HOST": host,
    }  # fmt: skip


async def catalogued(store: CatalogueStore) -> str:
    """A model of the catalogue that a host loads, and an order; the id of the host."""
    entry = CatalogueEntry(MODEL, "models/tiny", aliases=("small",))
    await store.put(entry)
    await store.offer(entry)
    await store.take_load(MODEL, "host", 0)
    await store.beat(HostStatus("host", "machine", 1, 1, offers={MODEL: 1}, held=(HeldModel(MODEL, "loading"),)))
    await store.order("load", MODEL)
    return "host"


async def shared(run: SharedRun) -> str:
    """A run with a leader and a member; the id of some bytes of theirs."""
    await run.lead("epoch", b"spec", begin=True)
    await run.members.beat("member")
    await run.send(b"word")
    await run.answer(b"answer")
    return (await run.parcels.put(b"weights")).id


async def averaged(store: RoundStore) -> str:
    """A federation with a run whose turn it is; the id of its average."""
    state = await store.parcels.put(b"weights")
    await store.begin(b"{}", state)
    await store.members.beat("run")
    await store.put_change(1, "run", state, 1)
    await store.turn("run")
    return state.id


async def learned(store: LearnerStore, name: str) -> tuple[str, str]:
    """A learner with an answer, a state and a save, and a request that waits; the ids of the two."""
    spec = LearnerSpec(id=name, model=MODEL, rank=1, scale=1.0)
    await store.create(spec)
    for number in (1, 2):
        await store.place(spec, number, BeginRequest())
    held = await store.take(name)
    assert held is not None
    state, saved = await store.put_state(name, b"weights"), await store.put_saved(name, b"weights")
    info = SaveInfo(name="a", kind="state", created_ms=1, expires_ms=2**41, bytes_id=saved)
    assert await store.put_answer(held, 1, SaveDone("a", "state"), state=state, save=info)
    await store.announce(ServiceCard(id="s", model=MODEL, max_rank=1, max_learners=1))
    return state, saved


async def test_every_command_of_the_tour_shows_something(served: Ring, redis: Redis) -> None:
    names = await filled(served, redis)
    assert len(COMMANDS) > 65
    for line in COMMANDS:
        command = shlex.split(re.sub(r"\$([A-Z]+)", lambda found: names[found[1]], line))
        if command[0] in ("SUBSCRIBE", "PSUBSCRIBE", "--bigkeys"):
            continue
        answer = await redis.execute_command(*command)
        if answer is None and any(word in line for word in MAY_BE_ABSENT):
            continue
        assert answer is not None, line
        empty = answer in ([], {}, 0, b"") or (command[0] == "SCAN" and not answer[1])
        assert not empty or any(word in line for word in MAY_BE_EMPTY), line


@pytest.mark.parametrize("kind", keys.DOCUMENTED, ids=lambda kind: kind.pattern)
def test_the_tour_goes_past_every_kind_of_key(kind: keys.Key) -> None:
    names = {word for line in COMMANDS for word in shlex.split(line)}
    assert any(fnmatchcase(name, kind.pattern) for name in names), f"{kind.pattern} ({kind.meaning}) is not on the page"


async def test_the_channels_of_the_tour_speak(served: Ring, redis: Redis) -> None:
    await publish(AdapterStore(redis), base="some other base")
    version = await AdapterStore(redis).latest("policy")
    heard: set[str] = set()
    async with redis.pubsub() as channel:
        for line in COMMANDS:
            verb, *patterns = shlex.split(line)
            if verb in ("SUBSCRIBE", "PSUBSCRIBE"):
                await (channel.subscribe if verb == "SUBSCRIBE" else channel.psubscribe)(*patterns)

        async def listen() -> None:
            async for message in channel.listen():
                if message["type"] in ("message", "pmessage"):
                    heard.add(str((message["pattern"] or message["channel"]).decode()))
                    if len(heard) == 2:
                        return

        listening = asyncio.create_task(listen())
        await publish(AdapterStore(redis), base="some other base", seed=1)
        await AdapterStore(redis).rollback("policy", version)
        async with httpx.AsyncClient(base_url=served.url, timeout=HANG_S) as http:
            body: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        async with asyncio.timeout(HANG_S):
            await listening
    assert heard == {"parallm:api:{*}:live", "parallm:adapters:events"}


async def test_metrics_of_a_real_worker_add_up(served: Ring) -> None:
    labels = f'{{class="interactive",model_name="{MODEL}"}}'
    async with httpx.AsyncClient(base_url=served.url, timeout=HANG_S) as http:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 12, "ignore_eos": True}
        usage = (await http.post("/v1/completions", json=body)).json()["usage"]
        found: dict[str, float] = {}

        async def figures() -> bool:
            for line in (await http.get("/metrics")).text.splitlines():
                if not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    found[name] = float(value)
            return found.get(f"vllm:inter_token_latency_seconds_count{labels}", 0) >= 11

        await wait_until(figures)
    ended = found[f"vllm:e2e_request_latency_seconds_count{labels}"]
    assert usage["completion_tokens"] == 12
    assert found[f'vllm:generation_tokens_total{{model_name="{MODEL}"}}'] >= 12
    assert found[f"vllm:time_to_first_token_seconds_count{labels}"] == ended
    whole, queued, inference = (
        found[f"vllm:{name}_seconds_sum{labels}"]
        for name in ("e2e_request_latency", "request_queue_time", "request_inference_time")
    )
    assert abs(whole - queued - inference) < 0.005 * ended
    assert found[f'vllm:request_success_total{{finished_reason="length",model_name="{MODEL}"}}'] >= 1
