"""The ring in a terminal: a snapshot as tables, and the tables of each second.

Apart from the command (top.py), since a snapshot's types bring a client of Redis along, which no other command needs.
"""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from api.cli.client import InferenceClient
from api.ops.ring_view import RingSample, RingSnapshot
from api.ops.sizes import size

BLOCKS = " ▁▂▃▄▅▆▇█"
SPARK = 48  # samples in a line of blocks
BAR = 8
JOBS_SHOWN = 8


_STATE_STYLES = {"ready": "green", "running": "green", "succeeded": "green", "training": "green", "queued": "yellow",
                 "starting": "yellow", "waiting": "yellow", "draining": "yellow", "paused": "yellow", "failed": "red",
                 "expired": "red", "stuck": "red"}  # fmt: skip


async def look(url: str, api_key: str) -> RingSnapshot:
    async with InferenceClient(url, api_key=api_key, patience_s=0) as client:
        return await client.call("GET", "/v1/ring/snapshot", RingSnapshot)


async def watch(url: str, api_key: str, interval: float) -> None:
    async with InferenceClient(url, api_key=api_key) as client:
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                live.update(view(await client.call("GET", "/v1/ring/snapshot", RingSnapshot)), refresh=True)
                await asyncio.sleep(interval)


def view(ring: RingSnapshot) -> RenderableType:
    parts: list[RenderableType] = [_head(ring), "", _workers(ring), "", _queues(ring)]
    parts[2:2] = [_models(ring), ""] if ring.catalogue else []
    for table, has_rows in ((_jobs, ring.jobs), (_adapters, ring.adapters), (_trainings, ring.trainings)):
        parts += ["", table(ring)] if has_rows else []
    return Group(*parts)


def _head(ring: RingSnapshot) -> RenderableType:
    redis = ring.redis
    rows, most = sum(w.rows for w in ring.workers), sum(w.max_rows for w in ring.workers)
    line = Text.assemble(
        ("ParaLLM  ", "bold"),
        (f"{ring.tokens_per_s:.0f} tok/s", "bold green"),
        f"   rows {rows}/{most}   waiting {sum(q.waiting for q in ring.queues)}   jobs {ring.jobs_active}   ",
        (f"dead letters {ring.dead_letters}", "red" if ring.dead_letters else ""),
    )
    server = Text(
        f"{redis.version}   {size(redis.used_bytes)}   {redis.commands_per_s} commands/s   "
        f"{redis.clients} clients   {redis.persistence}",
        "dim",
    )
    return Group(line, Text(sparkline(rates(ring.history)), "green"), server)


def rates(history: Sequence[RingSample]) -> list[float]:
    """Tokens per second between samples."""
    return [
        max(0.0, 1000 * (b.tokens - a.tokens) / (b.at_ms - a.at_ms)) for a, b in pairwise(history) if b.at_ms > a.at_ms
    ]


def sparkline(values: Sequence[float]) -> str:
    """The newest values as blocks, the highest of them full."""
    shown = list(values)[-SPARK:]
    top_value = max(shown, default=0.0)
    if not top_value:
        return ""
    return "".join(BLOCKS[min(8, int(value / top_value * 8 + 0.5))] for value in shown)


def _workers(ring: RingSnapshot) -> Table:
    table = _table("worker", "state", "model", "rows", "KV", "tok/s>", "adapters", "seen>")
    for worker in ring.workers:
        adapters = ", ".join(f"{name}@{version}" for name, version in sorted(worker.adapters.items()))
        table.add_row(
            escape(worker.id),
            _state(worker.state),
            escape(worker.model),
            f"{_bar(worker.rows, worker.max_rows)} {worker.rows}/{worker.max_rows}",
            f"{_bar(worker.kv_bytes, worker.kv_limit_bytes)} {size(worker.kv_bytes)}",
            f"{worker.tokens_per_s:.0f}",
            escape(adapters) or "[dim]base[/]",
            f"{max(0, ring.at_ms - worker.heartbeat_ms) / 1000:.0f} s",
        )
    if not ring.workers:
        table.add_row("[red]no live worker[/]")
    return table


def _models(ring: RingSnapshot) -> Table:
    table = _table("model", "state", "on", "waiting>", "running>")
    for model in ring.catalogue:
        on = (f"{place.host} ({place.state} {place.progress:.0%})" for place in model.places)
        table.add_row(
            escape(model.name),
            _state(model.state),
            escape(", ".join(on) or model.why),
            str(sum(model.waiting.values())),
            str(model.running),
        )
    return table


def _queues(ring: RingSnapshot) -> Table:
    table = _table("queue", "class", "waiting>", "leased>", "oldest>", "done/s>")
    for q in ring.queues:
        oldest = f"{q.oldest_ms / 1000:.1f} s" if q.waiting else ""
        figures = (str(q.waiting), str(q.leased), oldest, f"{q.ended_per_s:.1f}")
        table.add_row(escape(q.model), q.sequence_class, *figures)
    return table


def _jobs(ring: RingSnapshot) -> Table:
    table = _table("job", "state", "samples", "failed>", "reward>")
    for job in ring.jobs[:JOBS_SHOWN]:
        done = round(job.progress * job.counts.total)
        reward = "" if job.mean_reward is None else f"{job.mean_reward:.3f}"
        samples = f"{_bar(done, job.counts.total)} {done}/{job.counts.total}"
        table.add_row(escape(job.id), _state(job.status), samples, str(job.counts.failed), reward)
    return table


def _adapters(ring: RingSnapshot) -> Table:
    table = _table("adapter", "latest>", "best>", "versions>", "loaded by")
    for adapter in ring.adapters:
        s = adapter.summary
        loaded = ", ".join(f"{worker}@{version}" for worker, version in sorted(adapter.loaded.items()))
        best = f"@{s.best}" if s.best else ""
        table.add_row(escape(s.name), f"@{s.latest}", best, str(len(s.versions)), escape(loaded))
    return table


def _trainings(ring: RingSnapshot) -> Table:
    table = _table("policy", "trainer", "step>", "version>", "reward>", "loss>", "KL>", "lag>")
    for training in ring.trainings:
        run = training.status
        state = _state(run.state) if training.alive else "[dim]not running[/]"
        figures = ("" if value is None else f"{value:.3g}" for value in (run.reward, run.loss, run.kl))
        lag = str(run.lag) if run.mode in ("", "rl") else ""
        table.add_row(escape(run.policy), state, str(run.train_step), f"@{run.version}", *figures, lag)
    return table


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        name = title.removesuffix(">")
        whole = name in ("rows", "KV", "samples", "state", "trainer")
        table.add_column(name, justify="right" if name != title else "left", overflow="fold", no_wrap=whole)
    return table


def _state(state: str) -> str:
    style = _STATE_STYLES.get(state, "dim")
    return f"[{style}]{state}[/]"


def _bar(value: float, limit: float) -> str:
    full = round(BAR * min(1.0, value / limit)) if limit else 0
    return f"[green]{'━' * full}[/][dim]{'━' * (BAR - full)}[/]"
