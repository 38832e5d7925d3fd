"""`mlx_parallm batch FILE`, `batches` and `files`: requests from a file, answers into a file.

The page is docs/reference/batches.md.
"""

import codecs
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from shutil import copyfileobj
from tempfile import SpooledTemporaryFile
from typing import IO, Annotated, cast

import msgspec
import typer

from api.cli.batch_client import BatchClient, BatchInfo
from api.cli.client import DEFAULT_URL
from api.cli.console import (
    LOOK_PATIENCE_S,
    PATIENCE_S,
    ApiKey,
    Json,
    Url,
    ask,
    err,
    fail,
    open_input,
    output,
    plain,
    print_json,
    print_rows,
    progress_bar,
    segment,
    show_text,
)
from api.cli.http import RequestFailedError
from api.ops.sizes import size

NOT_COMPLETED = 3
ERRORS_SHOWN = 10

app = typer.Typer(no_args_is_help=True, help="Batches: list, show, cancel, get their answers.")
files_app = typer.Typer(no_args_is_help=True, help="Files that batches read and write.")

BatchId = Annotated[str, typer.Argument(metavar="BATCH")]
FileId = Annotated[str, typer.Argument(metavar="FILE_ID")]
Limit = Annotated[int, typer.Option(min=1, max=100)]
Wait = Annotated[bool, typer.Option("--wait", help="wait until the batch has ended")]
Answers = Annotated[Path | None, typer.Option("--out", "-o", help="write the answers to this file")]
Refusals = Annotated[Path | None, typer.Option("--errors", help="write the lines without an answer to this file")]


def batch(
    file: Annotated[str, typer.Argument(help="JSON lines in the form of OpenAI's batches; - reads stdin")],
    endpoint: Annotated[str, typer.Option(help="endpoint of all requests; default: the first line's url")] = "",
    window: Annotated[str, typer.Option(help="time after which the batch expires: 30m, 24h, 7d")] = "24h",
    metadata: Annotated[list[str] | None, typer.Option("--metadata", metavar="KEY=VALUE")] = None,
    wait: Wait = False,
    answers: Answers = None,
    errors: Refusals = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Answer a file of requests; --out and --errors wait until it has ended."""
    pairs = dict(map(_pair, metadata or ()))
    for path in (answers, errors):
        _check_writable(path)
    with open_input(file) as given, _seekable(given) as lines:
        endpoint = endpoint or _endpoint(file, lines)

        async def run(client: BatchClient) -> BatchInfo:
            stored = await client.upload(Path(file).name if file != "-" else "stdin.jsonl", lines)
            try:
                made = await client.create(stored.id, endpoint, window, pairs)
            except RequestFailedError as error:
                if error.http_status == 400:  # no batch was made, and no other process knows of the file
                    await client.delete_file(stored.id)
                raise
            if wait or answers or errors:
                err.print(f"submitted {made.id}")
                made = await _watch(client, made.id)
                await _write(client, made, answers, errors)
            return made

        _report(ask(url, api_key, run, PATIENCE_S), as_json)


@app.command("list")
def list_batches(limit: Limit = 20, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """List the newest batches first."""
    newest = ask(url, api_key, lambda client: client.batches(limit))
    if as_json:
        return print_json(newest)
    return print_rows(("batch", "status", "lines", "failed", "model", "created"), map(_row, newest))


@app.command()
def show(
    batch_id: BatchId, wait: Wait = False, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False
) -> None:
    """Show the progress of a batch; exit code 3 if it has ended and a line has no answer."""
    look, patience_s = (_watch, PATIENCE_S) if wait else (BatchClient.batch, LOOK_PATIENCE_S)
    _report(ask(url, api_key, lambda client: look(client, segment(batch_id)), patience_s), as_json)


@app.command()
def cancel(batch_id: BatchId, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """Cancel a batch and wait until it has ended; its answers so far remain."""

    async def run(client: BatchClient) -> BatchInfo:
        await client.cancel_batch(segment(batch_id))
        return await client.wait_batch(segment(batch_id))

    ended = ask(url, api_key, run, PATIENCE_S)
    show_text(ended, as_json, _summary(ended))


@app.command()
def results(
    batch_id: BatchId, answers: Answers = None, errors: Refusals = None, url: Url = DEFAULT_URL, api_key: ApiKey = ""
) -> None:
    """Write the answers of a batch that has ended, to stdout unless --out or --errors names a file."""

    async def run(client: BatchClient) -> None:
        record = await client.batch(segment(batch_id))
        if not record.ended:
            fail(f"{record.id} is {record.status}: its answers come when it has ended (batches show --wait)", 1)
        if answers or errors:
            await _write(client, record, answers, errors)
        elif record.output_file_id is None:
            fail(f"{record.id} is {record.status} without an answer; --errors FILE writes why", 1)
        else:
            await _copy(client.content(record.output_file_id), None)

    ask(url, api_key, run)


@files_app.command("list")
def list_files(
    purpose: Annotated[str, typer.Option(help="batch or batch_output")] = "",
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 20,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """List the newest files first."""
    newest = ask(url, api_key, lambda client: client.files(limit, purpose))
    if as_json:
        return print_json(newest)
    rows = [(file.id, file.purpose, size(file.bytes), _moment(file.expires_at), file.filename) for file in newest]
    return print_rows(("file", "purpose", "size", "expires", "name"), rows)


@files_app.command()
def get(
    file_id: FileId,
    to: Annotated[Path | None, typer.Option("--out", "-o", help="write to this file instead of stdout")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Write a file's bytes to a local file or to stdout."""
    ask(url, api_key, lambda client: _copy(client.content(segment(file_id)), to))


@files_app.command()
def delete(
    file_ids: Annotated[list[str], typer.Argument(metavar="FILE_ID...")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Delete files; a batch in progress no longer needs its input file."""
    for file_id in file_ids:
        ask(url, api_key, lambda client: client.delete_file(segment(file_id)))  # noqa: B023 - called at once
        show_text({"id": file_id, "deleted": True}, as_json, f"{plain(file_id)} deleted")


# -- within


async def _watch(client: BatchClient, batch_id: str) -> BatchInfo:
    with progress_bar(batch_id) as update:

        def advance(batch: BatchInfo) -> None:
            counts = batch.request_counts
            update(batch.status, counts.completed + counts.failed, counts.total or None)

        return await client.wait_batch(batch_id, advance)


async def _write(client: BatchClient, ended: BatchInfo, answers: Path | None, errors: Path | None) -> None:
    """Both files; one that the batch does not have is empty here."""
    for path, file_id in ((answers, ended.output_file_id), (errors, ended.error_file_id)):
        if path is not None:
            await _copy(client.content(file_id) if file_id else _nothing(), path)


async def _nothing() -> AsyncGenerator[bytes, None]:
    for data in list[bytes]():
        yield data


async def _copy(content: AsyncGenerator[bytes, None], path: Path | None) -> None:
    with output(path) as write:
        async with aclosing(content):
            async for data in content:
                write(data)


def _check_writable(path: Path | None) -> None:
    """Said before the batch is made, and not after it."""
    try:
        if path is not None:
            path.open("ab").close()
    except OSError as error:
        fail(f"{path}: {error.strerror}", 2)


@contextmanager
def _seekable(given: IO[bytes]) -> Iterator[IO[bytes]]:
    if given.seekable():
        yield given
        return
    with SpooledTemporaryFile(max_size=8_388_608) as spool:
        copyfileobj(given, spool)
        yield cast(IO[bytes], spool)


def _endpoint(file: str, lines: IO[bytes]) -> str:
    lines.seek(0)
    try:
        return msgspec.json.decode(lines.readline().removeprefix(codecs.BOM_UTF8), type=_FirstLine).url
    except msgspec.MsgspecError:
        fail(f"{file}: its first line is no request with a 'url' (docs/reference/batches.md); or give --endpoint", 2)


class _FirstLine(msgspec.Struct):
    url: str


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        fail(f"--metadata {text}: give KEY=VALUE", 2)
    return name, value


def _report(batch: BatchInfo, as_json: bool) -> None:
    show_text(batch, as_json, _summary(batch))
    whole = batch.status == "completed" and not batch.request_counts.failed
    if batch.ended and not whole:
        raise typer.Exit(NOT_COMPLETED)


def _row(batch: BatchInfo) -> tuple[str, ...]:
    counts = batch.request_counts
    done = f"{counts.completed + counts.failed}/{counts.total}"
    return batch.id, batch.status, done, str(counts.failed), batch.model or "", _moment(batch.created_at)


def _summary(batch: BatchInfo) -> str:
    counts = batch.request_counts
    parts = [f"{counts.completed} of {counts.total} lines"] + ([f"{counts.failed} failed"] if counts.failed else [])
    if batch.usage and batch.usage["output_tokens"]:
        parts.append(f"{batch.usage['output_tokens']} tokens")
    ended_at = batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at
    if ended_at:
        parts.append(f"{ended_at - batch.created_at} s")
    lines = [f"{batch.id} {batch.status}: {', '.join(parts)}"]
    errors = batch.errors.data if batch.errors else []
    lines += [f"line {error.line}: {error.message}" if error.line else error.message for error in errors[:ERRORS_SHOWN]]
    if len(errors) > ERRORS_SHOWN:
        lines.append(f"and {len(errors) - ERRORS_SHOWN} more (--json)")
    return plain("\n".join(lines))


def _moment(at_s: int) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}Z"
