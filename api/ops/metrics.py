"""`GET /metrics`: the figures of the whole ring, from Redis, in Prometheus' text format; the same from any api.

Counters and histograms are the totals of all processes (shared/redis/processes/metric_store.py), gauges what Redis says
at this moment (api/ops/gauges.py). A client that asks for JSON gets the few figures that training code reads.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from api.http.auth import is_open
from api.ops.gauges import Gauges, read_gauges
from api.ring.choosing import from_each
from api.ring.ring import Ring, ring_of
from shared.process.other_rings import HOME
from shared.redis.processes.metric_store import read_totals
from shared.telemetry.metrics import CATALOGUE, INF, MOST_SERIES, SUM, parse_field, series
from shared.telemetry.metrics import Metric as Described

router = APIRouter(tags=["operations"])
TheRing = Annotated[Ring, Depends(ring_of)]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # OpenMetrics would escape the colons of vLLM's names


Figures = tuple[Gauges, dict[str, float]]  # gauges, and totals of counters and histograms


class SpecDecoding(BaseModel):
    """Response body of GET /v1/spec_decode/metrics."""

    enabled: bool = Field(description="a live worker drafts tokens")
    mode: str = Field(description="of --spec-decode; of several the first by name")
    draft_models: list[str] = Field(description="the models that draft on live workers")
    acceptance_rate: float | None = Field(description="of drafted tokens; null: none was drafted")
    average_accepted_tokens: float | None = Field(description="of a draft")
    mode_distribution: dict[str, int] = Field(description="decode steps without drafts (none) and with")
    controller: dict[str, float] | None = Field(description="what was drafted, since the beginning; null: nothing")


@router.get(
    "/metrics",
    summary="Prometheus metrics",
    response_class=Response,
    responses={
        200: {
            "content": {
                "text/plain": {"schema": {"type": "string"}},
                "application/json": {"schema": {"type": "object"}},
            },
            "description": "Prometheus' text format; JSON for a client that accepts only that",
        }
    },
)
async def metrics(request: Request, ring: TheRing) -> Response:
    """Figures of the whole ring in Prometheus' text format, or as JSON (docs/reference/metrics.md lists the names)."""
    await ring.home.counts.write()
    if wants_json(request.headers.get("accept", "")):
        gauges, _ = await _figures(ring)
        return JSONResponse(await _brief(ring, gauges))
    figures = {each.name: said for each, said in await from_each(ring, _figures)}
    if not ring.others:
        return Response(exposition(*figures[ring.name]), media_type=CONTENT_TYPE)
    return Response(exposition_of_all(figures, {each.name for each in ring.all}), media_type=CONTENT_TYPE)


async def _figures(ring: Ring) -> Figures:
    totals = await read_totals(ring.redis)
    return await read_gauges(ring, totals), totals


@router.get("/v1/spec_decode/metrics", summary="Speculative decoding")
async def spec_decode_metrics(ring: TheRing) -> SpecDecoding:
    """How many tokens were drafted, and how many of them the model drew itself; over all models and workers."""
    await ring.home.counts.write()
    totals = await read_totals(ring.redis)
    workers = [worker for name in await ring.registry.names() for worker in await ring.registry.workers(name)]
    modes = sorted({worker.speculation for worker in workers if not worker.speculation.startswith("none")})
    counted = {name: int(_total(totals, f"vllm:spec_decode_num_{name}_total")) for name in _DRAFTS}
    drafts, drafted, accepted = counted.values()
    by_model = {name: _total(totals, f"mlx_parallm_spec_decode_{name}_total") for name in _BY_MODEL}
    steps, checked = (
        _total(totals, "vllm:iteration_tokens_total"),
        _total(totals, "mlx_parallm_spec_decode_steps_total"),
    )
    return SpecDecoding(
        enabled=bool(modes),
        mode=modes[0] if modes else "none",
        draft_models=sorted({worker.draft_model for worker in workers if worker.draft_model}),
        acceptance_rate=accepted / drafted if drafted else None,
        average_accepted_tokens=accepted / drafts if drafts else None,
        mode_distribution={"none": int(max(0, steps - checked)), "drafted": int(checked)},
        controller={name: float(value) for name, value in (counted | by_model).items()} if drafts else None,
    )


_DRAFTS = ("drafts", "draft_tokens", "accepted_tokens")
_BY_MODEL = ("draft_model_tokens", "draft_model_accepted_tokens")


def _total(totals: dict[str, float], name: str) -> float:
    """Sum of a counter's values, or of a histogram's observations, over all labels."""
    return sum(value for _, bucket, value in series(totals, name) if bucket != SUM)


def wants_json(accept: str) -> bool:
    """True if a client accepts JSON and none of the other formats."""
    return "application/json" in accept and "text/plain" not in accept


def exposition(gauges: Gauges, totals: dict[str, float]) -> bytes:
    """The metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(gauges, totals))
    return generate_latest(registry)


def exposition_of_all(figures: Mapping[str, Figures], rings: Collection[str]) -> bytes:
    """The same of several rings; those of others than the process's own have a label `ring`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FiguresOfAll(figures, rings))
    return generate_latest(registry)


class _FiguresOfAll(Collector):
    """One scrape's figures of the rings that answer, and which do."""

    def __init__(self, figures: Mapping[str, Figures], rings: Collection[str]) -> None:
        self._figures = figures
        self._rings = rings

    def collect(self) -> Iterator[Metric]:
        """Every family that has a value in some ring."""
        families: dict[str, Metric] = {}
        for name, figures in self._figures.items():
            label = {} if name == HOME else {"ring": name}
            for family in _Figures(*figures).collect():
                samples = [sample._replace(labels={**sample.labels, **label}) for sample in family.samples]
                family.samples = []
                families.setdefault(family.name, family).samples += samples
        yield from families.values()
        answers = {(name,): float(name in self._figures) for name in self._rings}
        yield _plain_family(CATALOGUE["mlx_parallm_ring_up"], answers.items())


class _Figures(Collector):
    """One scrape's figures for prometheus_client."""

    def __init__(self, gauges: Gauges, totals: dict[str, float]) -> None:
        self._gauges = gauges
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        """Every family of the catalogue that has a value."""
        counted = _by_family(self._totals)
        _add_names_of_instrumentator(counted)
        left_out: dict[tuple[str, ...], float] = {}
        for name, metric in CATALOGUE.items():
            values: Mapping[tuple[str, ...], Any] = self._gauges.get(name) or counted.get(name) or {}
            if len(values) > MOST_SERIES:
                left_out[(name,)] = len(values) - MOST_SERIES
                told = itertools.islice(values, MOST_SERIES) if name in self._gauges else sorted(values)[:MOST_SERIES]
                values = {labels: values[labels] for labels in told}
            if values and metric.kind == "histogram":
                yield _histogram_family(metric, values)
            elif values and name not in self._gauges:
                yield _plain_family(metric, ((labels, counts.get("", 0.0)) for labels, counts in values.items()))
            elif values:
                yield _plain_family(metric, values.items())
        if left_out:
            yield _plain_family(CATALOGUE["mlx_parallm_series_left_out"], left_out.items())


_Counted = dict[tuple[str, ...], dict[str, float]]
_Series = Mapping[tuple[str, ...], dict[str, float]]  # label values -> bucket ("" of a counter) -> value


def _by_family(totals: dict[str, float]) -> dict[str, _Counted]:
    families: dict[str, _Counted] = defaultdict(lambda: defaultdict(dict))
    for field, value in totals.items():
        try:
            name, labels, bucket = parse_field(field)
        except KeyError:  # of a newer version
            continue
        families[name][labels][bucket] = value
    return families


def _add_names_of_instrumentator(families: dict[str, _Counted]) -> None:
    """Our figures of HTTP requests, also under the names that vLLM's boards read."""
    requests, durations = families["http_requests_total"], families["http_request_duration_seconds"]
    for (method, route, status), values in families["mlx_parallm_http_requests_total"].items():
        if not is_open(route):
            series = requests[method, f"{status[:1]}xx", route]
            series[""] = series.get("", 0.0) + values[""]
    for (route,), buckets in families["mlx_parallm_http_request_seconds"].items():
        if not is_open(route):
            durations[(route,)] = buckets


def _plain_family(metric: Described, values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in sorted(values):
        family.add_metric(labels, value)
    return family


def _histogram_family(metric: Described, series: _Series) -> Metric:
    family = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
    for labels, values in sorted(series.items()):
        counts = [(float(bound), count) for bound, count in values.items() if bound != SUM]
        buckets: list[tuple[str, float]] = []
        for bound in (*metric.buckets, math.inf):  # others than those counted by are sums of several
            below = sum(count for counted_to, count in counts if counted_to <= bound)
            buckets.append((INF if bound == math.inf else str(bound), below))
        family.add_metric(labels, buckets, values.get(SUM, 0.0))
        if metric.buckets[0] < 0:  # the library leaves these two out, since such a sum may shrink
            named = dict(zip(metric.labels, labels, strict=True))
            family.add_sample(f"{metric.name}_count", named, below)
            family.add_sample(f"{metric.name}_sum", named, values.get(SUM, 0.0))
    return family


async def _brief(ring: Ring, gauges: Gauges) -> dict[str, Any]:
    """The figures that training code reads as JSON."""
    latest = await ring.adapters.latest(ring.settings.default_adapter)
    rows = gauges["mlx_parallm_worker_max_rows"].values()
    return {
        "current_policy_version": latest,
        "queue_depth": int(sum(gauges["mlx_parallm_queue_depth"].values())),
        "max_batch_size": int(max(rows, default=0)),
        "flush_interval_ms": 0,  # requests are not gathered: a new one joins at the next decode step
        "active_sequences": int(gauges["active_sequences"][()]),
        "tokens_per_second": round(sum(gauges["mlx_parallm_worker_tokens_per_second"].values()), 1),
        "workers": len(rows),
    }
