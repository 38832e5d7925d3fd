"""`mlx_parallm top`: the ring in a terminal, from `GET /v1/ring/snapshot` once a second.

Exit codes: 0, also after Ctrl-C; 1 when the server refuses or cannot be reached.
"""

import asyncio
import sys
from typing import Annotated

import typer
from rich.console import Console

from api.cli.client import DEFAULT_URL
from api.cli.console import ApiKey, Url, fail, print_json
from api.cli.http import RequestFailedError


def top(
    once: Annotated[bool, typer.Option("--once", help="print one view and exit")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="seconds between two updates")] = 1.0,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="print one snapshot as JSON and exit")] = False,
) -> None:
    """Watch workers, queues, jobs, adapters and training."""
    from api.cli.ring_screen import look, view, watch  # takes a third of a second to load, which no other command needs

    try:
        if as_json or once or not sys.stdout.isatty():
            snapshot = asyncio.run(look(url, api_key))
            if as_json:
                print_json(snapshot)
            else:
                Console(highlight=False).print(view(snapshot))
        else:
            asyncio.run(watch(url, api_key, interval))
    except RequestFailedError as error:
        fail(error.message, 1)
    except KeyboardInterrupt:
        return
