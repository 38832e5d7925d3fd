"""`mlx_parallm models`: what is served, and the catalogue of what the ring may serve (api/ops/catalogue.py)."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.client import DEFAULT_URL
from api.cli.console import ApiKey, Json, Url, ask, call, fail, out, print_json, print_rows, segment, show_text
from api.ops.sizes import size

app = typer.Typer(help="Models: those that requests may name, and the catalogue of those that hosts load on demand.")

PATH = "/v1/models"
LOOK_EVERY_S = 0.5
Name = Annotated[str, typer.Argument(help="name or alias of a model of the catalogue")]
Host = Annotated[
    str, typer.Option("--host", help="id or machine of a host; default: any that can, or all that hold it")
]
Wait = Annotated[bool, typer.Option("--wait", help="return when it is loaded; exit code 1 if it cannot be")]
Aliases = Annotated[list[str] | None, typer.Option("--alias", help="another name in requests; may be repeated")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="FLAG=VALUE", help="flag of its worker, such as kv-bits=8; may be repeated"),
]
Priority = Annotated[int | None, typer.Option(help="of two models that want the same memory, the higher one has it")]
Idle = Annotated[
    float | None, typer.Option("--idle-s", help="unload it after so long without a request; 0: host's own")
]
Ranks = Annotated[
    int | None,
    typer.Option(help="processes that hold it together; more than 1: a group serves it, and no host loads it"),
]


@app.callback(invoke_without_command=True)
def models(context: typer.Context, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """List the models and adapters that requests may name; `list` shows where each one is."""
    if context.invoked_subcommand is not None:
        return None
    served = ask(url, api_key, lambda client: client.models())
    if as_json:
        return print_json(served)
    for model in served:
        out.print(model.id)
    return None


@app.command("list")
def list_models(url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """Show each model with its state, the hosts that hold it, and why a host cannot load it."""
    shown = [each for each in call(url, api_key, "GET", PATH)["data"] if each["root"] == each["id"]]
    if as_json:
        return print_json(shown)
    titles = ("model", "state", "on", "size", "context", "pin", "priority", "aliases", "source", "note")
    return print_rows(titles, map(_row, shown))


@app.command()
def add(
    source: Annotated[str, typer.Argument(help="folder, GGUF file or hub name, as a worker's --model takes it")],
    name: Annotated[str, typer.Option(help="name in requests; default: the last part of the source")] = "",
    alias: Aliases = None,
    pin: Annotated[bool, typer.Option("--pin", help="a host always holds it")] = False,
    priority: Priority = None,
    idle_s: Idle = None,
    sha256: Annotated[str, typer.Option(help="base_sha256 that its weights must have")] = "",
    ranks: Ranks = None,
    option: Options = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Add a model to the catalogue: hosts that have its files, or may fetch them, load it when a request needs it."""
    source = str(Path(source).resolve()) if Path(source).exists() else source  # a host has another working directory
    body = {"source": source, "name": name, "sha256": sha256, "pinned": pin, "priority": priority, "idle_s": idle_s}
    body |= {"aliases": alias or None, "ranks": ranks, "options": _options(option)}
    added = call(url, api_key, "POST", PATH, {key: value for key, value in body.items() if value not in (None, "")})
    show_text(added, as_json, f"{added['id']} added ({added['state']})")


@app.command("set")
def change(
    name: Name,
    alias: Annotated[
        list[str] | None, typer.Option("--alias", help="another name, in place of all that it has; may be repeated")
    ] = None,
    priority: Priority = None,
    idle_s: Idle = None,
    ranks: Ranks = None,
    option: Options = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Change aliases, priority, time to unload, ranks or worker's flags of a model."""
    given: dict[str, Any] = {"aliases": alias or None, "priority": priority, "idle_s": idle_s}
    given |= {"ranks": ranks, "options": _options(option)}
    _change(name, {key: value for key, value in given.items() if value is not None}, "changed", url, api_key, as_json)


@app.command()
def pin(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """Have a host always hold a model."""
    _change(name, {"pinned": True}, "pinned", url, api_key, as_json)


@app.command()
def unpin(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """Let hosts unload a model when others need its memory, or when it is idle."""
    _change(name, {"pinned": False}, "unpinned", url, api_key, as_json)


@app.command()
def load(
    name: Name, host: Host = "", wait: Wait = False, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False
) -> None:
    """Have a host load a model; one that has failed is tried again."""
    shown = call(url, api_key, "POST", f"{PATH}/load", {"model": name, "host": host})
    failed_before = _failed_ms(shown)
    while wait and shown["state"] != "ready":
        time.sleep(LOOK_EVERY_S)
        shown = call(url, api_key, "GET", f"{PATH}/{segment(name)}")
        if shown["state"] == "unavailable" or (shown["state"] == "failed" and _failed_ms(shown) != failed_before):
            fail(f"{name}: {(shown['catalogue'] or {}).get('why', shown['state'])}", 1)
    show_text(shown, as_json, f"{shown['id']}: {_state(shown)}")


@app.command()
def unload(name: Name, host: Host = "", url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """Have hosts unload a model once its running requests have ended; the next request loads it again."""
    shown = call(url, api_key, "POST", f"{PATH}/unload", {"model": name, "host": host})
    show_text(shown, as_json, f"{shown['id']}: {_state(shown)}")


@app.command("rm")
def remove(name: Name, url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """Remove a model from the catalogue; hosts unload it, and its files stay."""
    answer = call(url, api_key, "DELETE", f"{PATH}/{segment(name)}")
    show_text(answer, as_json, f"{answer['id']} removed")


def _change(name: str, fields: dict[str, Any], done: str, url: str, api_key: str, as_json: bool) -> None:
    shown = call(url, api_key, "PATCH", f"{PATH}/{segment(name)}", fields)
    show_text(shown, as_json, f"{shown['id']} {done}")


def _options(given: list[str] | None) -> dict[str, str] | None:
    pairs = [each.partition("=") for each in given or ()]
    if wrong := next(("".join(pair) for pair in pairs if not all(pair)), None):
        fail(f"--option {wrong}: give FLAG=VALUE, such as kv-bits=8", 2)
    return {flag.lstrip("-"): value for flag, _, value in pairs} or None


def _failed_ms(model: dict[str, Any]) -> int:
    """Unix time of the last failure to load it; 0: none."""
    places = (model["catalogue"] or {}).get("hosts", ())
    return max((int(place["since_ms"]) for place in places if place["state"] == "failed"), default=0)


def _state(model: dict[str, Any]) -> str:
    return (
        f"{model['state']} {model['progress']:.0%}" if model["state"] in ("loading", "downloading") else model["state"]
    )


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    facts = model["catalogue"] or {}
    hosts = ", ".join(f"{place['host']} ({place['state']})" for place in facts.get("hosts", ()))
    nbytes = facts.get("size_bytes", 0)
    return (
        model["id"],
        _state(model),
        hosts or "-",
        size(nbytes) if nbytes else "-",
        str(model["context_length"] or "-"),
        "yes" if facts.get("pinned") else "-",
        str(facts.get("priority", "-")),
        ", ".join(facts.get("aliases", ())) or "-",
        facts.get("source", "-"),
        facts.get("why") or "-",
    )
