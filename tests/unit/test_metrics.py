"""The catalogue, the tally of a process, and what a scrape makes of it."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.ops.metrics import exposition, wants_json
from shared.telemetry.metrics import CATALOGUE, Tally, field_of, parse_field

ROOT = Path(__file__).parents[2]


def parsed(text: bytes) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_names_keep_to_prometheus_rules() -> None:
    for metric in CATALOGUE.values():
        assert metric.name.endswith("_total") == (metric.kind == "counter") or metric.name in (
            "vllm:iteration_tokens_total",
        )
        assert metric.meaning
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.buckets) == (metric.kind == "histogram")


def test_label_values_survive_their_way_through_redis() -> None:
    for value in ("mlx-community/Qwen3|4B", "50%", 'say "hi"\n', "模型", ""):
        assert parse_field(field_of("vllm:generation_tokens_total", value)) == (
            "vllm:generation_tokens_total", (value,), ""
        )  # fmt: skip
    with pytest.raises(KeyError):
        parse_field("vllm:no_such_metric|m")


def test_a_histogram_is_exposed_with_cumulative_buckets() -> None:
    tally = Tally()
    histogram = tally.histogram("vllm:request_params_n", "m")
    for value in (1, 2, 3, 1000):
        histogram.observe(value)
    found = parsed(exposition({}, tally.fields()))
    buckets = {labels["le"]: value for labels, value in found["vllm:request_params_n_bucket"]}
    assert (buckets["1.0"], buckets["2.0"], buckets["5.0"], buckets["100.0"], buckets["+Inf"]) == (1, 2, 3, 3, 4)
    assert found["vllm:request_params_n_count"] == [({"model_name": "m"}, 4)]
    assert found["vllm:request_params_n_sum"] == [({"model_name": "m"}, 1006)]


def test_a_histogram_of_negative_values_tells_count_and_sum_too() -> None:
    tally = Tally()
    for value in (-1, 0.5, -0.25):
        tally.histogram("mlx_parallm_reward", "exact").observe(value)
    found = parsed(exposition({}, tally.fields()))
    assert found["mlx_parallm_reward_count"] == [({"reward": "exact"}, 3)]
    assert found["mlx_parallm_reward_sum"] == [({"reward": "exact"}, -0.75)]


def test_an_observation_on_a_bound_belongs_below_it() -> None:
    tally = Tally()
    tally.histogram("vllm:request_params_n", "m").observe(5, 2)
    assert tally.fields() == {"vllm:request_params_n|m|5.0": 2, "vllm:request_params_n|m|sum": 10}


def test_colons_and_strange_label_values_come_out_whole() -> None:
    tally = Tally()
    tally.counter("vllm:request_success_total", 'a"b\\c\nd', "stop").add(3)
    text = exposition({"vllm:num_requests_running": {("m",): 2.0}}, {**tally.fields(), "of_a_newer_version|x": 1.0})
    found = parsed(text)
    assert found["vllm:request_success_total"] == [({"model_name": 'a"b\\c\nd', "finished_reason": "stop"}, 3)]
    assert found["vllm:num_requests_running"] == [({"model_name": "m"}, 2)]
    assert "of_a_newer_version" not in found


def test_a_counter_is_known_before_it_counts() -> None:
    tally = Tally()
    tally.counter("vllm:prefix_cache_hits_total", "m")
    tally.histogram("vllm:request_params_n", "m")
    assert tally.fields() == {"vllm:prefix_cache_hits_total|m": 0}


def test_a_metric_is_counted_as_what_it_is() -> None:
    with pytest.raises(AssertionError):
        Tally().counter("vllm:num_requests_running", "m")
    with pytest.raises(AssertionError):
        Tally().counter("vllm:generation_tokens_total")


@pytest.mark.parametrize(
    ("accept", "as_json"),
    [("application/json", True), ("*/*", False), ("", False), ("text/plain,application/json;q=0.1", False)],
)
def test_json_is_for_those_who_ask_for_nothing_else(accept: str, as_json: bool) -> None:
    assert wants_json(accept) == as_json


def test_the_grafana_board_asks_for_metrics_that_exist() -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "parallm.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 20
    for query in queries:
        for name in re.findall(r"(?:vllm:|mlx_parallm_)\w+", query):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert name in CATALOGUE or CATALOGUE[base].kind == "histogram", name
