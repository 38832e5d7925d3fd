"""Parts that all commands of the client share: how they ask the server, and print results to stdout and errors to
stderr."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn, TypeVar
from urllib.parse import quote

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from api.cli.batch_client import BatchClient
from api.cli.client import InferenceClient
from api.cli.http import RequestFailedError

T = TypeVar("T")

LOOK_PATIENCE_S = 5.0  # with a server that is away or busy, of a command that only looks
PATIENCE_S = 30.0  # of a command that submits, cancels, waits or follows

Url = Annotated[str, typer.Option("--url", envvar="PARALLM_URL", help="address of the server")]
ApiKey = Annotated[str, typer.Option("--api-key", envvar="PARALLM_API_KEY", help="API key, if the server requires one")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Model = Annotated[str, typer.Option("--model", "-m", help="model to use; default: the only one that is served")]
JsonAnyway = Annotated[bool, typer.Option("--json", help="no effect: the output is always JSON")]

err = Console(stderr=True, highlight=False)
out = Console(highlight=False, soft_wrap=True)
rows_out = Console(highlight=False, soft_wrap=True, width=250)  # columns, whatever the terminal has


def ask(
    url: str,
    api_key: str,
    work: Callable[[BatchClient], Awaitable[T]],
    patience_s: float = LOOK_PATIENCE_S,
    *,
    connections: int = 100,
    interrupted: str = "interrupted; a job or batch that was submitted goes on",
) -> T:
    """Give `work` a client and run it to its end; when the server refuses or is away, a message and exit code 1."""

    async def run() -> T:
        async with BatchClient(url, api_key=api_key, patience_s=patience_s, connections=connections) as client:
            return await work(client)

    try:
        return asyncio.run(run())
    except RequestFailedError as error:
        fail(error.message, 1)
    except KeyboardInterrupt:
        fail(interrupted, 130)


def fail(message: str, code: int) -> NoReturn:
    """End with an error message and this exit code."""
    err.print(f"[bold red]error[/]: {plain(message)}", soft_wrap=True)
    raise typer.Exit(code)


async def only_model(client: InferenceClient) -> str:
    """The model that is served; exit code 2 when that is not one."""
    names = [model.id for model in await client.models() if model.is_base]
    if len(names) != 1:
        fail(f"give --model: {', '.join(names) or 'no model'} is served", 2)
    return names[0]


def open_input(file: str) -> IO[bytes]:
    """A file that is named on the command line; - is stdin."""
    if file == "-":
        return sys.stdin.buffer
    try:
        return Path(file).open("rb")
    except OSError as error:
        fail(f"{file}: {error.strerror}", 2)


@contextmanager
def output(path: Path | None) -> Iterator[Callable[[bytes], None]]:
    """Yields a function that writes to a file, or to stdout. The file is opened for the first bytes, or at the end when
    there are none: an older file is unchanged if the server refuses the request."""
    to = None if path is not None else sys.stdout.buffer

    def write(data: bytes) -> None:
        nonlocal to
        if to is None:
            assert path is not None, "stdout is there from the start"
            to = path.open("wb")
        to.write(data)

    try:
        try:
            yield write
            write(b"")
        finally:
            if to is not None:
                to.flush()
            if to is not None and path is not None:
                to.close()
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        raise SystemExit(0) from None
    except OSError as error:
        fail(f"{path or 'stdout'}: {error.strerror}", 2)


def call(url: str, api_key: str, method: str, path: str, body: Any = None, **params: Any) -> dict[str, Any]:
    """The JSON object that a request brings."""
    return ask(url, api_key, lambda client: client.call(method, path, dict[str, Any], body, **params))


@contextmanager
def progress_bar(label: str, total: int | None = None) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on a terminal's stderr while the block runs; what is given sets its label, what is done, and the total."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        bar = progress.add_task(label, total=total)
        yield lambda label, done, total: progress.update(bar, description=label, completed=done, total=total)


def print_rows(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table whose lines are not fitted into the terminal: people copy ids, and programs read lines."""
    table = Table(*titles, box=None)
    for row in rows:
        table.add_row(*map(plain, row))
    rows_out.print(table)


def segment(name: str) -> str:
    """One segment of a path: a name with a slash must not reach another endpoint."""
    if name in ("", ".", ".."):
        fail(f"{name!r} is no id", 2)
    return quote(name, safe="")


def plain(text: str) -> str:
    """Text that rich shows as it is."""
    return text.replace("[", r"\[")


def show_text(value: Any, as_json: bool, text: str) -> None:
    """A value as JSON, or its text for people."""
    print_json(value) if as_json else out.print(text)


def print_json(value: Any) -> None:
    """A value as indented JSON, for programs."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
