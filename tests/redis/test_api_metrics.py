"""/metrics of an api process in a ring with a scripted worker."""

import time

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from api.app import ROUTED
from api.ops.metrics import exposition
from shared.learners import ServiceCard
from shared.machine.status import MachineStatus
from shared.ranks import RankState, RankStatus
from shared.redis import keys
from shared.redis.connection.client import server_time_ms
from shared.redis.training.board import TrainingBoard
from shared.telemetry.metrics import CATALOGUE, MOST_SERIES, Tally
from shared.training import TrainerStatus
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, working
from tests.unit.test_bodies import api_routes


async def scrape(server: Api) -> dict[str, dict[tuple[str, ...], float]]:
    response = await server.http.get("/metrics", headers={"Accept": "text/plain;version=0.0.4"})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(response.text))
    names = {f"{f.name}_total" if f.type == "counter" else f.name for f in families}
    assert names <= CATALOGUE.keys(), "a metric that docs/reference/metrics.md does not know"
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for sample in (sample for family in families for sample in family.samples):
        found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


async def test_any_api_tells_of_the_whole_ring(redis_url: str) -> None:
    async with working(redis_url, lambda spec: Answer("hi")), api(redis_url) as one, api(redis_url) as other:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 5, "n": 2}
        assert (await one.post("/v1/completions", body)).status_code == 200
        assert (await one.http.get("/v1/jobs/none")).status_code == 404
        await one.ring.counts.write()
        found = await scrape(other)
        assert found["vllm:request_params_n_sum"] == {(MODEL,): 2}
        assert found["vllm:num_requests_running"] == {(MODEL,): 0}
        assert found["mlx_parallm_worker_max_rows"] == {(MODEL, "w1"): 8}
        text = (await other.http.get("/metrics")).text
        assert 'mlx_parallm_http_requests_total{method="POST",route="/v1/completions",status="200"} 1.0' in text
        assert 'route="/v1/jobs/{job_id}",status="404"' in text
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0' in text
        assert 'http_requests_total{handler="/v1/jobs/{job_id}",method="GET",status="4xx"} 1.0' in text
        assert 'http_request_duration_seconds_count{handler="/v1/completions"} 1.0' in text
        assert 'http_requests_total{handler="/metrics"' not in text, "probes are left out"
        assert f'mlx_parallm_queue_depth{{class="interactive",model_name="{MODEL}"}} 0.0' in text


async def test_methods_that_a_route_does_not_have_are_counted_together(redis_url: str) -> None:
    async with api(redis_url) as server:
        for path in ("/health", "/v1/completions", "/nowhere"):
            assert (await server.http.patch(path)).status_code in (404, 405)
        found = await scrape(server)
    counted = {labels: count for labels, count in found["mlx_parallm_http_requests_total"].items() if "PATCH" in labels}
    assert counted == {("PATCH", "other", "404"): 1, ("PATCH", "other", "405"): 2}


def test_a_scrape_stays_small_whatever_clients_ask_for_and_make() -> None:
    tally = Tally()
    routes = [route.path for module in ROUTED for route in api_routes(module.router.routes)]
    for route in routes:
        for status in ("200", "400", "404", "503"):
            tally.counter("mlx_parallm_http_requests_total", "POST", route, status).add()
        tally.histogram("mlx_parallm_http_request_seconds", route).observe(0.3)
    adapters = {(f"run-{at:04}",): float(at) for at in range(2 * MOST_SERIES)}
    text = exposition({"mlx_parallm_adapter_latest_version": adapters}, tally.fields()).decode()
    found = {family.name: family.samples for family in text_string_to_metric_families(text)}
    assert len(found["mlx_parallm_adapter_latest_version"]) == MOST_SERIES
    (left_out,) = found["mlx_parallm_series_left_out"]
    assert (left_out.labels, left_out.value) == ({"metric": "mlx_parallm_adapter_latest_version"}, MOST_SERIES)
    of_one = [each for each in found["http_request_duration_seconds"] if each.labels["handler"] == "/v1/completions"]
    buckets = [(each.labels["le"], each.value) for each in of_one if each.name.endswith("_bucket")]
    assert buckets == [("0.1", 0.0), ("0.5", 1.0), ("1.0", 1.0), ("+Inf", 1.0)]
    assert len(text) < 3000 * len(set(routes)) + 100 * MOST_SERIES


async def test_the_trainer_s_figures_come_from_its_board(redis_url: str, redis: Redis) -> None:
    board = TrainingBoard(redis, "policy")
    status = TrainerStatus(policy="policy", run="r", owner="o", loss=-0.5, trajectories=64, checkpoint_saves=2, lag=1)
    status = msgspec.structs.replace(status, held_out=0.75, held_out_true=0.25, value_loss=0.4, explained=0.1)
    await board.write(status)
    await board.alert("gate_failed", "norm")
    async with api(redis_url) as server:
        found = await scrape(server)
    assert found["mlx_parallm_rl_training_loss"] == {("policy",): -0.5}
    assert found["mlx_parallm_rl_held_out_reward"] == {("policy",): 0.75}
    assert found["mlx_parallm_rl_held_out_true_reward"] == {("policy",): 0.25}
    assert found["mlx_parallm_rl_value_loss"] == {("policy",): 0.4}
    assert found["mlx_parallm_rl_value_explained"] == {("policy",): 0.1}
    assert found["mlx_parallm_rl_trajectories_collected"] == {("policy",): 64}
    assert found["mlx_parallm_checkpoint_saves_total"] == {("policy",): 2}
    assert found["mlx_parallm_rl_trainer_up"] == {("policy",): 0}
    assert "mlx_parallm_rl_reward" not in found  # not known yet
    assert found["mlx_parallm_rl_updates_per_second"] == {("policy",): 0}
    assert found["mlx_parallm_rl_trainer_ranks"] == {("policy",): 0}


async def test_ranks_of_a_trainer_are_shown_while_it_lives(redis_url: str, redis: Redis) -> None:
    board, now_ms = TrainingBoard(redis, "policy"), time.time_ns() // 1_000_000
    states: tuple[RankState, ...] = ("ready", "lost")
    ranks = tuple(RankStatus(at, f"mac{at}", "10.0.0.1", "ring", state) for at, state in enumerate(states))
    full = MachineStatus(memory_total=100, footprint=7, pressure="critical")
    ranks = (ranks[0], msgspec.structs.replace(ranks[1], machine=full))
    own = MachineStatus(memory_total=100, footprint=7, gpu_total=90, gpu_held=50, gpu_available=40)
    await board.hold("o")
    await board.write(TrainerStatus(policy="policy", run="r", owner="o", heartbeat_ms=now_ms, ranks=ranks, machine=own))
    newer = TrainingBoard(redis, "newer")
    await newer.hold("n")
    await newer.write(TrainerStatus(policy="newer", run="r", owner="n", heartbeat_ms=now_ms))
    await redis.hset(keys.training("newer"), "state", "of a version to come")
    async with api(redis_url) as server:
        found = await scrape(server)
        health = (await server.http.get("/health")).json()
        page = (await server.http.get("/dashboard")).text
        await board.let_go("o")
        assert (await server.http.get("/health")).json()["trainers"] == []
    figures = [found[f"mlx_parallm_rl_trainer_{name}"] for name in ("up", "ranks", "ranks_ready")]
    assert figures == [{("policy",): 1}, {("policy",): 2}, {("policy",): 1}]
    (trainer,) = health["trainers"]
    assert [(rank["host"], rank["state"]) for rank in trainer["ranks"]] == [("mac0", "ready"), ("mac1", "lost")]
    assert "the trainer of policy 'policy' has lost rank 1 (mac1), and ends" in health["reasons"]
    assert "2 ranks (mac0 ready, mac1 lost)" in page
    assert found["mlx_parallm_rl_trainer_memory_bytes"] == {("policy",): 50}, "what it holds of its GPU"
    assert "GPU 50 B, 40 B of 90 B free" in page
    assert (trainer["machine"]["gpu_total"], trainer["ranks"][1]["machine"]["footprint"]) == (90, 7)
    assert "rank 1 of the trainer of policy 'policy': memory pressure is critical" in health["reasons"]


async def test_a_training_service_shows_its_memory(redis_url: str, redis: Redis) -> None:
    full = MachineStatus(memory_total=100, footprint=7, memory_available=2, pressure="critical")
    card = ServiceCard(id="s", model=MODEL, max_rank=8, max_learners=4, learners=3, machine=full)
    async with working(redis_url, lambda spec: Answer()), api(redis_url) as server:
        await server.ring.learners.announce(card)
        found, health = await scrape(server), (await server.http.get("/health")).json()
        page = (await server.http.get("/dashboard")).text
    (service,) = health["training_services"]
    assert (service["learners"], service["machine"]["footprint"]) == (3, 7)
    assert f"the training service of '{MODEL}': memory pressure is critical" in health["reasons"]
    names = ("", "_max", "_memory_bytes", "_memory_available_bytes", "_memory_pressure")
    assert [found[f"mlx_parallm_learners{name}"][(MODEL,)] for name in names] == [3, 4, 7, 2, 2]
    assert "3 of 4" in page
    assert "process 7 B, machine 2 B of 100 B free" in page


async def test_training_code_reads_json(redis_url: str) -> None:
    async with working(redis_url, lambda spec: Answer()), api(redis_url) as server:
        response = await server.http.get("/metrics", headers={"Accept": "application/json"})
    assert response.json() == {
        "current_policy_version": 0,
        "queue_depth": 0,
        "max_batch_size": 8,
        "flush_interval_ms": 0,
        "active_sequences": 0,
        "tokens_per_second": 0.0,
        "workers": 1,
    }


async def test_a_ring_without_workers_is_told_from_one_whose_workers_died(redis_url: str, redis: Redis) -> None:
    async with api(redis_url) as server:
        async with working(redis_url, lambda spec: Answer("hi")):
            found = await scrape(server)
            assert (found["dist_fatal"], found["shutdown_clean"]) == ({(): 0}, {(): 1})
            await redis.zadd(keys.workers(MODEL), {"died": await server_time_ms(redis)})
            assert (await scrape(server))["shutdown_clean"] == {(): 0}
        await redis.delete(keys.worker(MODEL, "w1"))
        assert (await scrape(server))["dist_fatal"] == {(): 1}


async def test_what_is_drafted_and_accepted_is_told_beside_the_steps_without(redis_url: str) -> None:
    async with api(redis_url) as server:
        tally = server.ring.tally
        tally.histogram("vllm:iteration_tokens_total", MODEL).observe(3, times=5)
        told = (await server.http.get("/v1/spec_decode/metrics")).json()
        assert (told["enabled"], told["mode"], told["mode_distribution"]) == (False, "none", {"none": 5, "drafted": 0})
        assert told["acceptance_rate"] is told["average_accepted_tokens"] is told["controller"] is None
        for name, value in (("drafts", 4), ("draft_tokens", 20), ("accepted_tokens", 15)):
            tally.counter(f"vllm:spec_decode_num_{name}_total", MODEL).add(value)
        tally.counter("mlx_parallm_spec_decode_steps_total", MODEL).add(2)
        tally.counter("mlx_parallm_spec_decode_draft_model_tokens_total", MODEL).add(5)
        tally.counter("mlx_parallm_spec_decode_draft_model_accepted_tokens_total", MODEL).add(3)
        told = (await server.http.get("/v1/spec_decode/metrics")).json()
    assert (told["acceptance_rate"], told["average_accepted_tokens"]) == (0.75, 3.75)
    assert told["mode_distribution"] == {"none": 3, "drafted": 2}
    by_model = {"draft_model_tokens": 5, "draft_model_accepted_tokens": 3}
    assert told["controller"] == {"drafts": 4, "draft_tokens": 20, "accepted_tokens": 15} | by_model
