"""`mlx_parallm key`: make API keys. Works without a server."""

import sys
from typing import Annotated, NoReturn

import typer

from shared.errors import SetupError

app = typer.Typer(no_args_is_help=True, help="Make API keys for a server's key file.")


@app.command()
def new(
    name: Annotated[str, typer.Option(help="name of the key in logs")] = "",
    sequence_class: Annotated[str, typer.Option("--class", help="interactive or batch")] = "",
    rate: Annotated[str, typer.Option(help="rate limit of token requests, such as 600/minute")] = "",
    concurrent: Annotated[int, typer.Option(min=0, help="most requests at a time; 0: the server's own bound")] = 0,
    tenant: Annotated[
        str, typer.Option(help="tenant that owns what is made with the key; other tenants do not see it")
    ] = "",
    admin: Annotated[bool, typer.Option("--admin", help="may see and do everything on a server with tenants")] = False,
) -> None:
    """Print a new key (first line) and its line for --api-key-file (second line)."""
    from api.http.api_keys import line_of, new_key  # loads a server's settings, which few commands need

    key = new_key()
    options = {
        "name": name,
        "class": sequence_class,
        "rate": rate.replace(" ", ""),
        "concurrent": str(concurrent or ""),
        "tenant": tenant,
        "role": "admin" if admin else "",
    }
    try:
        line = line_of(key, **options)
    except SetupError as error:
        _fail(str(error))
    print(key)
    print(line)


@app.command("hash")
def hash_key() -> None:
    """Read a key from stdin and print its line for --api-key-file."""
    from api.http.api_keys import line_of

    key = sys.stdin.buffer.readline().strip()
    if not key or not key.isascii():
        _fail("the first line of stdin must be a key of ASCII characters")
    print(line_of(key.decode()))


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(2)
