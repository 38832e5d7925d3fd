"""`mlx_parallm adapters`: list, show, upload, roll back and delete adapter versions (api/adapters/routes.py)."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from api.cli.client import DEFAULT_URL
from api.cli.console import ApiKey, Json, Url, ask, call, fail, plain, print_json, print_rows, segment, show_text

app = typer.Typer(no_args_is_help=True, help="Adapters and their versions.")

Name = Annotated[str, typer.Argument(help="the adapter")]


@app.command("list")
def list_adapters(url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """List adapters, with the version that `latest` is."""
    all_adapters = call(url, api_key, "GET", "/v1/adapters")["data"]
    if as_json:
        return print_json(all_adapters)
    rows = []
    for adapter in all_adapters:
        versions = adapter["versions"]
        held = f"{len(versions)} ({versions[0]} to {versions[-1]})" if versions else "0"
        rows.append((adapter["name"], str(adapter["latest"] or "-"), str(adapter["best"] or "-"), held))
    return print_rows(("adapter", "latest", "best", "versions"), rows)


@app.command()
def show(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """Show an adapter's versions, newest first; --json also gives the moves of `latest` and the workers' acks."""
    adapter = call(url, api_key, "GET", f"/v1/adapters/{segment(name)}")
    if as_json:
        return print_json(adapter)
    titles = ("version", "", "status", "parent", "rank", "MB", "train step", "source", "created")
    rows = []
    for version in reversed(adapter["versions"]):
        marks = [mark for mark in ("latest", "best") if adapter[mark] == version["version"]]
        created = datetime.fromtimestamp(version["created_ms"] / 1000, UTC)
        cells = (
            version["id"],
            " ".join(marks),
            version["status"],
            str(version["parent"] or "-"),
            str(version["rank"]),
            f"{version['size'] / 1e6:.1f}",
            str(version["train_step"]),
            version["source"],
            f"{created:%Y-%m-%d %H:%M:%S}Z",
        )
        rows.append(cells)
    return print_rows(titles, rows)


@app.command()
def upload(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="an adapter directory of mlx-lm or PEFT")],
    name: Annotated[str, typer.Option(help="the adapter; default: the server's --default-adapter")] = "",
    model: Annotated[str, typer.Option("--model", "-m", help="its base; default: the only one that is served")] = "",
    candidate: Annotated[bool, typer.Option("--candidate", help="leave `latest` where it is")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Make a directory of this machine the next version of an adapter."""
    if not folder.is_dir():
        fail(f"{folder}: no such directory", 2)
    fields = {"name": name, "model": model, "set_latest": "false" if candidate else ""}
    given = {key: value for key, value in fields.items() if value}
    try:
        loaded = ask(url, api_key, lambda client: client.upload_adapter(folder, given))
    except OSError as error:
        fail(f"{error.filename or folder}: {error.strerror or error}", 2)
    show_text(loaded, as_json, plain(loaded.message))


@app.command()
def rollback(
    name: Name,
    version: Annotated[int, typer.Argument(min=1, help="becomes `latest`")],
    reason: Annotated[str, typer.Option(help="for the adapter's history")] = "rollback",
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Make an earlier version the latest; its successors stay and can be asked for by number."""
    body = {"version": version, "reason": reason}
    answer = call(url, api_key, "POST", f"/v1/adapters/{segment(name)}/rollback", body)
    show_text(answer, as_json, plain(answer["message"]))


@app.command()
def delete(
    which: Annotated[str, typer.Argument(metavar="NAME@K", help="NAME alone, with --all: every version")],
    everything: Annotated[bool, typer.Option("--all", help="the adapter with all its versions")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Delete a version; refused while it is the latest or a worker uses it."""
    name, _, version = which.partition("@")
    if everything == bool(version) or (version and not version.isdecimal()):
        fail(f"{which}: give NAME@K, or NAME with --all", 2)
    path = f"/v1/adapters/{segment(name)}" + (f"/versions/{version}" if version else "")
    answer = call(url, api_key, "DELETE", path)
    show_text(answer, as_json, f"{plain(answer['id'])} deleted")
