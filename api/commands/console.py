"""How the client's commands speak: figures to stdout, errors to stderr without a traceback."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

import msgspec
import typer
from rich.console import Console

from api.client import RequestFailedError

T = TypeVar("T")

err = Console(stderr=True, highlight=False)
out = Console(highlight=False, soft_wrap=True)


def perform(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; when the server refuses or is away, a message and exit code 1 instead of a traceback."""
    try:
        return asyncio.run(work)
    except RequestFailedError as error:
        fail(error.message, 1)


def fail(message: str, code: int) -> NoReturn:
    """End with an error message and this exit code."""
    err.print(f"[bold red]error[/]: {plain(message)}")
    raise typer.Exit(code)


def plain(text: str) -> str:
    """Text that rich shows as it is."""
    return text.replace("[", r"\[")


def print_json(value: Any) -> None:
    """A value as indented JSON, for programs."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
