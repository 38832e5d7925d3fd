"""`mlx_parallm`: the client on the command line.

Exit codes: 0 done; 1 the server refused or could not be reached; 2 the command line is wrong; 3 the job or batch
did not succeed.
Results and JSON go to stdout, progress and errors to stderr.
"""

from contextlib import aclosing
from pathlib import Path
from typing import Annotated, cast, get_args

import msgspec
import typer

from api.cli import (
    acl,
    adapters,
    batches,
    bench,
    chat,
    convert,
    deadletters,
    doctor,
    key,
    launch,
    mcp_server,
    models,
    replay,
    top,
)
from api.cli.client import DEFAULT_URL, InferenceClient, JobRequest
from api.cli.console import (
    LOOK_PATIENCE_S,
    PATIENCE_S,
    ApiKey,
    Json,
    JsonAnyway,
    Model,
    Url,
    ask,
    err,
    fail,
    only_model,
    open_input,
    output,
    plain,
    print_json,
    print_rows,
    progress_bar,
    segment,
    show_text,
)
from shared.jobs import TERMINAL, JobKind, JobStatus, RewardSpec

JOB_NOT_SUCCEEDED = 3

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(adapters.app, name="adapters")
app.add_typer(deadletters.app, name="deadletters")
app.add_typer(key.app, name="key")
app.add_typer(models.app, name="models")
app.command("top")(top.top)
app.command("bench")(bench.bench)
app.command("chat")(chat.chat)
app.command("doctor")(doctor.doctor)
app.command()(convert.convert)
app.command("launch")(launch.launch)
app.command("mcp")(mcp_server.mcp)
app.command("replay")(replay.replay)
app.command()(acl.acl)
app.command("batch")(batches.batch)
app.add_typer(batches.app, name="batches")
app.add_typer(batches.files_app, name="files")


def _version(asked: bool) -> None:
    if asked:
        from shared.process.settings import version  # loads a server's settings, which few commands need

        print(version())
        raise typer.Exit


@app.callback()
def root(
    asked: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Client of a ParaLLM server."""


@app.command()
def submit(
    file: Annotated[str, typer.Argument(help='JSON lines like {"prompt": ..., "reference": ...}; - reads stdin')],
    model: Model = "",
    kind: Annotated[str, typer.Option(help="kind of job: generate, rollout or score; default: by --reward")] = "",
    n: Annotated[int, typer.Option(min=1, help="samples of each prompt")] = 1,
    reward: Annotated[str, typer.Option(help='name of a reward, or JSON: {"name": ..., "options": {...}}')] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float | None, typer.Option(min=0)] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    adapter: Annotated[str, typer.Option(help="NAME follows the latest version, NAME@K pins one")] = "",
    deadline_s: Annotated[float | None, typer.Option(min=0)] = None,
    idempotency_key: Annotated[str, typer.Option(help="key under which submitting again changes nothing")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="wait until the job has ended")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Submit a file of prompts as a job."""
    wanted = _reward(reward)
    lines = open_input(file)

    async def run(client: InferenceClient) -> JobStatus:
        request = JobRequest(
            kind=_kind(kind, wanted),
            model=model or await only_model(client),
            n=n,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            reward=wanted,
            adapter=adapter,
            deadline_s=deadline_s,
            idempotency_key=idempotency_key,
        )
        status = await client.submit(request, lines)
        if not wait:
            return status
        err.print(f"submitted {status.id}")
        return await _watch(client, status.id)

    with lines:
        _report(ask(url, api_key, run, PATIENCE_S), as_json)


@app.command()
def jobs(
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """List the newest jobs first."""
    newest = ask(url, api_key, lambda client: client.jobs(limit))
    if as_json:
        return print_json(newest)
    return print_rows(("job", "kind", "model", "status", "samples", "reward"), map(_row, newest))


@app.command()
def job(
    job_id: str,
    wait: Annotated[bool, typer.Option("--wait", help="wait until the job has ended")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Show the progress of a job; exit code 3 if it has ended without success."""
    look, patience_s = (_watch, PATIENCE_S) if wait else (InferenceClient.status, LOOK_PATIENCE_S)
    _report(ask(url, api_key, lambda client: look(client, segment(job_id)), patience_s), as_json)


@app.command()
def results(
    job_id: str,
    file: Annotated[Path | None, typer.Option("--out", "-o", help="write to this file instead of stdout")] = None,
    after: Annotated[int, typer.Option(help="begin after the sample with this ordinal")] = -1,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="wait for further results until the job has ended")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: JsonAnyway = False,
) -> None:
    """Write a job's trajectories in order as JSON lines; for a running job, those before the first unfinished one."""
    with output(file) as write:

        async def run(client: InferenceClient) -> int:
            count = 0
            async with aclosing(client.result_lines(segment(job_id), after, follow=follow)) as lines:
                async for line in lines:
                    write(line + b"\n")
                    count += 1
            return count

        count = ask(url, api_key, run, PATIENCE_S if follow else LOOK_PATIENCE_S)
    if file is not None:
        err.print(f"{count} trajectories in {file}")


@app.command()
def cancel(job_id: str, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """Cancel a job; finished samples remain."""

    async def run(client: InferenceClient) -> JobStatus:
        await client.cancel(segment(job_id))
        return await client.wait(segment(job_id))

    status = ask(url, api_key, run, PATIENCE_S)
    show_text(status, as_json, _summary(status))


@app.command()
def health(url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: JsonAnyway = False) -> None:
    """Print the state of the server and its workers (JSON); exit code 1 if it accepts no requests."""
    state = ask(url, api_key, lambda client: client.health(), 0)
    print_json(state)
    if state.get("status") in ("overloaded", "shutting_down"):
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the command `mlx_parallm`."""
    app()


# -- within


async def _watch(client: InferenceClient, job_id: str) -> JobStatus:
    with progress_bar(job_id) as update:

        def advance(status: JobStatus) -> None:
            total = status.counts.total
            update(status.status, round(status.progress * total), total)

        return await client.wait(job_id, advance)


def _report(status: JobStatus, as_json: bool) -> None:
    show_text(status, as_json, _summary(status))
    if status.status in TERMINAL and status.status != "succeeded":
        raise typer.Exit(JOB_NOT_SUCCEEDED)


def _row(status: JobStatus) -> tuple[str, ...]:
    done = f"{round(status.progress * status.counts.total)}/{status.counts.total}"
    return status.id, status.kind, status.model, status.status, done, _number(status.mean_reward)


def _summary(status: JobStatus) -> str:
    counts = status.counts
    parts = [f"{counts.succeeded} of {counts.total} samples"]
    parts += [f"{getattr(counts, name)} {name}" for name in ("failed", "cancelled", "expired") if getattr(counts, name)]
    if status.usage.completion_tokens:
        parts.append(f"{status.usage.completion_tokens} tokens")
    if status.mean_reward is not None:
        parts.append(f"mean reward {_number(status.mean_reward)}")
    if status.reward_errors:
        parts.append(f"{status.reward_errors} rewards failed")
    if status.finished_ms and status.started_ms:
        parts.append(f"{(status.finished_ms - status.started_ms) / 1000:.1f} s")
    error = f"\n{plain(status.error)}" if status.error else ""
    return f"{status.id} {status.status}: {', '.join(parts)}{error}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _reward(text: str) -> RewardSpec | None:
    if not text:
        return None
    if not text.startswith("{"):
        return RewardSpec(text)
    try:
        return msgspec.json.decode(text, type=RewardSpec)
    except msgspec.MsgspecError as error:
        fail(f"--reward: {error}", 2)


def _kind(kind: str, reward: RewardSpec | None) -> JobKind:
    if not kind:
        return "rollout" if reward is not None else "generate"
    for known in get_args(JobKind):
        if kind == known != "batch":
            return cast(JobKind, known)
    return fail(f"--kind {kind}: must be generate, rollout or score", 2)


if __name__ == "__main__":
    main()
