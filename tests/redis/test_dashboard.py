"""The dashboard over a real ring without workers: its pages and their events."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis
from safetensors.numpy import save

from api.ops.dashboard.parts import RewardsCache
from api.ops.dashboard.render import duration, number
from api.ops.dashboard.samples import histogram
from shared.redis.adapters.store import AdapterStore
from shared.redis.training.board import TrainingBoard
from shared.training import TrainerStatus, TrainingPoint
from tests.redis.adapter_versions import publish
from tests.redis.api_servers import Api
from tests.redis.dashboard_pages import HOSTILE, Checked, dashboard, events, filled, finished_job
from tests.redis.scripted_worker import MODEL
from tests.waiting import wait_until
from trainer.learn.ppo_network import first_weights, two_layers

STATIC = Path(__file__).parents[2] / "api" / "ops" / "dashboard" / "static"


@pytest.fixture
async def server(redis_url: str, redis: Redis) -> AsyncIterator[Api]:
    async with dashboard(redis_url, redis) as serving:
        yield serving


async def test_every_page_is_whole_escaped_and_asks_nobody_else(server: Api, redis: Redis) -> None:
    for path in await filled(server, redis):
        response = await server.http.get(f"/dashboard{path}")
        assert response.status_code == 200, path
        page = Checked(response.text)
        assert HOSTILE not in response.text
        assert page.inline == []
        assert [address for address in page.loaded if not address.startswith(("/", "#"))] == []
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


async def test_names_and_words_from_outside_are_shown_as_they_are(server: Api, redis: Redis) -> None:
    shown = "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;"
    for path in await filled(server, redis):
        if path in ("", "/batches", "/training", "/deadletters", "/adapters/policy") or path.startswith("/files"):
            assert shown in (await server.http.get(f"/dashboard{path}")).text, path


async def test_a_sample_is_coloured_by_how_sure_the_model_was_and_by_version(server: Api, redis: Redis) -> None:
    job = await finished_job(server, redis)
    piece = (await server.http.get(f"/dashboard/jobs/{job}/samples/0", headers={"HX-Request": "true"})).text
    Checked(piece)
    assert "<html" not in piece
    assert re.search(r'class="q0 v0" title="log-probability -0.010, policy@1">&lt;<', piece)
    assert re.search(r'class="q4 v0" title="log-probability -3.500, policy@1">s<', piece)
    assert 'class="q0 v1" title="policy@2"' in piece
    missing = await server.http.get(f"/dashboard/jobs/{job}/samples/1")
    assert missing.status_code == 404
    assert "has not finished" in missing.text


def test_our_own_files_name_no_other_address() -> None:
    for name in ("dashboard.js", "dashboard.css", "theme.js"):
        assert "://" not in (STATIC / name).read_text(), name
    for name in ("htmx-2.0.11.min.js", "htmx-ext-sse-2.2.4.min.js", "uplot-1.6.32.min.js"):
        assert (STATIC / name).stat().st_size > 2_000
    assert "MIT License" in (STATIC / "LICENSES.txt").read_text()


async def test_static_files_are_kept_by_browsers_and_nothing_else_is_served(server: Api) -> None:
    page = (await server.http.get("/dashboard")).text
    for address in re.findall(r'(?:src|href)="(/dashboard/static/[^"]+)"', page):
        response = await server.http.get(address)
        assert response.status_code == 200
        assert "immutable" in response.headers["cache-control"]
    for name in ("../render.py", "..%2Frender.py", "nothing.js"):
        assert (await server.http.get(f"/dashboard/static/{name}")).status_code == 404


async def test_parts_of_the_page_arrive_as_events(server: Api, redis: Redis) -> None:
    await filled(server, redis)
    found = await events(server, "/dashboard/events/ring", '"throughput"')
    assert {"redis", "tiles", "workers", "queues", "jobs", "adapters", "trainings", "curves"} <= found.keys()
    for name, data in found.items():
        if name != "curves":
            Checked(data)
        assert HOSTILE not in data
    training = await events(server, "/dashboard/events/training", '"reward"')
    assert "luxurious" in training["samples-policy"] and "0.75" in training["samples-policy"]
    assert HOSTILE not in training["samples-policy"]
    assert msgspec.json.decode(training["curves-policy"])["reward"] == {"x": [0], "series": [[0.5], [None], [0.25]]}


@pytest.mark.parametrize(
    ("mode", "has", "lacks"),
    [
        ("", {"KL to the base", "Lag", "trajectories", "rollbacks"}, {"episodes", "examples"}),
        ("ppo", {"Mean return", "KL to the version that acted", "episodes"}, {"Lag", "KL to the base", "tok/s"}),
        ("sft", {"Held-out share correct", "examples"}, {"Lag", "KL to the base", "Reward", "Entropy"}),
    ],
)
async def test_a_run_shows_the_figures_that_its_mode_has(
    server: Api, redis: Redis, mode: str, has: set[str], lacks: set[str]
) -> None:
    board = TrainingBoard(redis, "pole")
    await board.write(TrainerStatus(policy="pole", run="r", owner="o", mode=mode, checkpoints=("a", "b", "c")))
    await board.add(
        TrainingPoint(train_step=1, policy_step=1, version=1, at_ms=1, held_out=0.5, held_out_loss=0.25, explained=0.75)
    )
    page = (await server.http.get("/dashboard/training")).text
    text = re.findall(r">([^<>]+)</(?:dt|span)>", page)
    assert has <= {*text} and not lacks & {*text}
    drawn = re.findall(r'data-chart="([^"]+)" data-series="([^"]+)"', page)
    curves = msgspec.json.decode((await events(server, "/dashboard/events/training", '"loss"'))["curves-pole"])
    assert {name: len(series.split("|")) for name, series in drawn} == {
        name: len(chart["series"]) for name, chart in curves.items()
    }


async def test_a_network_has_layers_and_no_rank(server: Api, redis: Redis) -> None:
    network = two_layers(4, 2, discrete=True)
    tensors = save(first_weights(network, 0))
    config = msgspec.json.encode({"network": network})
    for policy, source in (("pole", "trainer"), ("pole", "upload")):
        if source == "trainer":
            await TrainingBoard(redis, policy).hold("a trainer")
        files = {"a": ("adapters.safetensors", tensors), "c": ("adapter_config.json", config)}
        fields = {"name": policy, "set_latest": str(source == "upload").lower()}
        answer = await server.http.post("/upload_adapter", data=fields, files=files)
        assert answer.status_code == 200, answer.text
    page = (await server.http.get("/dashboard/adapters/pole")).text
    assert re.findall(r"network of 6 layers · [0-9.]+ KB · (\w+)<", page) == ["upload", "trainer"]
    assert "rank" not in page


async def test_a_change_is_pushed_to_an_open_page(server: Api, redis: Redis) -> None:
    job = await finished_job(server, redis)

    async def cancel() -> None:
        await asyncio.sleep(0)
        await server.http.post(f"/v1/jobs/{job}/cancel")

    looking = asyncio.create_task(events(server, f"/dashboard/events/jobs/{job}", "state cancelled"))
    await cancel()
    assert "cancelled" in (await looking)["job"]


@pytest.mark.parametrize(
    ("value", "shown"), [(2716.4, "2716"), (0.5, "0.5"), (1234567, "1.23M"), (45678.9, "45.7k"), (None, "–"), (3, "3")]
)
def test_figures_are_short(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [
        (300_000, "5 min"),
        (305_000, "5 min 5 s"),
        (1000, "1 s"),
        (1500, "1.5 s"),
        (7_200_000, "2 h"),
        (86_400_000, "24 h"),
    ],
)
def test_spans_say_no_zero_parts(milliseconds: float, shown: str) -> None:
    assert duration(milliseconds) == shown


async def test_the_ring_is_told_as_json(server: Api, redis: Redis) -> None:
    await filled(server, redis)
    found: dict[str, Any] = {}

    async def is_fresh() -> bool:  # a snapshot is kept for a second
        found.update((await server.http.get("/v1/ring/snapshot")).json())
        return bool(found["dead_letters"])

    await wait_until(is_fresh)
    assert [worker["id"] for worker in found["workers"]] == [HOSTILE]
    assert {(q["model"], q["sequence_class"]) for q in found["queues"]} == {(MODEL, "interactive"), (MODEL, "batch")}
    assert (found["dead_letters"], found["jobs_active"]) == (1, 1)
    assert found["adapters"][0]["loaded"] == {HOSTILE: 1}


async def test_a_page_of_a_running_job_does_not_read_all_samples_every_second(server: Api, redis: Redis) -> None:
    job = await finished_job(server, redis)
    status, kept = await server.ring.jobs.status(job), RewardsCache()
    first = await kept.read(server.ring, status)
    assert first is not None
    assert await kept.read(server.ring, msgspec.structs.replace(status, progress=0.6)) is first
    ended = msgspec.structs.replace(status, progress=1.0, status="succeeded")
    last = await kept.read(server.ring, ended)
    assert last == first
    assert last is not first
    assert await kept.read(server.ring, ended) is last


async def test_an_adapter_s_page_tells_live_workers_from_those_that_are_gone(server: Api, redis: Redis) -> None:
    store = AdapterStore(redis)
    await publish(store, "policy")
    for worker in (HOSTILE, "w-dead"):
        await store.acknowledge(worker, "policy", 1)
    page = (await server.http.get("/dashboard/adapters/policy")).text
    assert "w-dead" not in page and "and 1 that is gone" in page
    assert page.count("&lt;script&gt;") >= 1, "the live one is shown"


def test_rewards_that_are_all_alike_are_one_bar_in_the_middle() -> None:
    alike, spread = histogram([0.5] * 3), histogram([0.0, 1.0, 1.0])
    assert alike is not None and spread is not None
    assert [(at, bar.samples) for at, bar in enumerate(alike.bars) if bar.samples] == [(10, 3)]
    assert [(at, bar.samples) for at, bar in enumerate(spread.bars) if bar.samples] == [(0, 1), (19, 2)]
    assert len(alike.bars) == len(spread.bars) == 20
