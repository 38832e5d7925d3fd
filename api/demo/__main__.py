"""Start everything, chat, run two rollout jobs while chatting, report, load an adapter under way, see, learn, stop.

`python -m api.demo --out demo-out`. Every token goes the way that a user's would: HTTP, queue, worker, stream.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from api.cli.client import InferenceClient
from api.demo.adapters import AdapterAct
from api.demo.chats import QUESTIONS, one_chat
from api.demo.learning import ACT_S, LearningAct
from api.demo.pictures import PictureAct
from api.demo.prompts import jobs_of
from api.demo.report import JobReport, percentile, show_table, write_histogram, write_summary
from api.demo.serving import MODEL, ring
from shared.jobs import JobStatus
from shared.trajectories import Trajectory

CHATS = 24  # streamed one after another while the jobs run

console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def main() -> int:
    """Run the demo; 0 when every part of it succeeded."""
    parser = argparse.ArgumentParser(prog="python -m api.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--learning-seconds", type=float, default=ACT_S, help="of the last act; 0 leaves it out")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="parallm-demo-") as data_dir:
        log_path = arguments.out / "serve.log"
        console.print(f"[bold]1[/] starting Redis, api, job runner and {arguments.workers} workers (log: {log_path})")
        with ring(Path(data_dir), log_path, arguments.workers, console) as served:
            code = asyncio.run(_acts(served.url, arguments.out))
            console.print("[bold]5[/] two adapters and the base in one batch, and a version loaded under way")
            code = code or int(not asyncio.run(AdapterAct(served.url, console).run()))
            console.print("[bold]6[/] a worker with a model that sees joins, and is asked about pictures")
            code = code or int(not asyncio.run(PictureAct(served, arguments.out, console).run()))
            if arguments.learning_seconds > 0:
                console.print("[bold]7[/] a trainer joins and learns sums, while chats on its policy go on")
                learned = asyncio.run(LearningAct(served, arguments.out, console).run(arguments.learning_seconds))
                code = code or int(not learned)
            return code


async def _acts(url: str, out: Path) -> int:
    openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    async with openai, InferenceClient(url) as client:
        await _chat(openai)
        began = time.monotonic()
        jobs = {name: (await client.submit(*job)).id for name, job in jobs_of(MODEL).items()}
        chats = asyncio.create_task(_chat_meanwhile(openai, began))
        statuses = await _watch(client, jobs)
        took_s = time.monotonic() - began
        first_token_ms = await chats
        reports = [await _report(client, name, status, out) for name, status in statuses.items()]
    _finish(out, reports, first_token_ms, took_s)
    return 0 if all(status.status == "succeeded" for status in statuses.values()) else 1


async def _chat(openai: AsyncOpenAI) -> None:
    console.print("[bold]2[/] one streamed chat answer, by the openai client")
    question = "who are you?"
    console.print(f"  user: {question}\n  assistant: ", end="")
    stream = await openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], stream=True, temperature=0, max_tokens=64
    )
    async for chunk in stream:
        if chunk.choices:
            console.print(chunk.choices[0].delta.content or "", end="", markup=False, soft_wrap=True)
    console.print()


async def _chat_meanwhile(openai: AsyncOpenAI, began: float) -> list[float]:
    """Stream chats while the jobs saturate the workers; the milliseconds to each first token."""
    chats = [await one_chat(openai, MODEL, QUESTIONS[i % len(QUESTIONS)], began) for i in range(CHATS)]
    if broken := [chat.error for chat in chats if chat.error]:
        raise SystemExit(f"a chat broke: {broken[0]}; see serve.log")
    return [chat.first_ms for chat in chats]


async def _watch(client: InferenceClient, jobs: dict[str, str]) -> dict[str, JobStatus]:
    """Poll the jobs to their end, with a progress bar each."""
    console.print("[bold]3[/] two rollout jobs, submitted and polled, while chats go on at higher priority")
    columns = (TextColumn("  {task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        async def watch(name: str, job_id: str) -> JobStatus:
            task = progress.add_task(name, total=None)

            def advance(status: JobStatus) -> None:
                counts = status.counts
                progress.update(task, total=counts.total, completed=counts.total - counts.queued - counts.running)

            return await client.wait(job_id, on_progress=advance)

        ended = await asyncio.gather(*(watch(name, job_id) for name, job_id in jobs.items()))
    return dict(zip(jobs, ended, strict=True))


async def _report(client: InferenceClient, name: str, status: JobStatus, out: Path) -> JobReport:
    """Write a job's trajectories to a file while adding them up."""
    report = JobReport(name, status)
    path = out / f"{name}.trajectories.jsonl"
    with path.open("wb") as file:
        async for line in client.result_lines(status.id):
            file.write(line + b"\n")
            report.add(msgspec.json.decode(line, type=Trajectory))
    return report


def _finish(out: Path, reports: list[JobReport], ms: list[float], took_s: float) -> None:
    console.print(f"[bold]4[/] {sum(r.samples for r in reports)} trajectories in {took_s:.1f} s")
    show_table(console, reports, took_s)
    console.print(
        f"  chat during the jobs: {len(ms)} streams, time to first token "
        f"p50 {percentile(ms, 50):.0f} ms, p99 {percentile(ms, 99):.0f} ms"
    )
    write_summary(out / "summary.json", reports, ms, took_s)
    write_histogram(out / "rewards.png", reports)
    names = ", ".join(sorted(path.name for path in out.iterdir()))
    console.print(f"  written to {out}/: {names}")


if __name__ == "__main__":
    sys.exit(main())
