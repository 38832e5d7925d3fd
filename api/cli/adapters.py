"""`mlx_parallm adapters`: list, show, upload, promote, roll back and delete adapter versions (api/adapters/routes.py).

Also out of the ring again: download a version, or merge it into its base. Merging takes MLX, so a process of its own
does it (`trainer/merging.py`).
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, get_args

import typer

from api.cli.batch_client import BatchClient
from api.cli.client import DEFAULT_URL
from api.cli.console import ApiKey, Json, Url, ask, call, fail, out, plain, print_json, print_rows, segment, show_text
from shared.adapters import AdapterManifest
from shared.errors import AdapterRejectedError, SetupError
from shared.process.whole_folder import check_free, whole_folder

app = typer.Typer(no_args_is_help=True, help="Adapters and their versions.")

Name = Annotated[str, typer.Argument(help="name of the adapter")]


@app.command("list")
def list_adapters(url: Url = DEFAULT_URL, api_key: ApiKey = "", as_json: Json = False) -> None:
    """List adapters with their latest versions."""
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
    """Show an adapter's versions, newest first; --json adds the history of `latest` and the workers' acks."""
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
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="adapter directory of mlx-lm or PEFT")],
    name: Annotated[str, typer.Option(help="name of the adapter; default: the server's --default-adapter")] = "",
    model: Annotated[
        str, typer.Option("--model", "-m", help="base model of the adapter; default: the only one that is served")
    ] = "",
    candidate: Annotated[bool, typer.Option("--candidate", help="do not move `latest` to it")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Upload an adapter directory of this machine as the next version of an adapter."""
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
def promote(
    name: Name,
    version: Annotated[int, typer.Argument(min=1, help="candidate that becomes `latest`")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Make a candidate the latest; refused for one that its gate has rejected, or that a newer one has replaced."""
    answer = call(url, api_key, "POST", f"/v1/adapters/{segment(name)}/promote", {"version": version})
    show_text(answer, as_json, plain(answer["message"]))


@app.command()
def rollback(
    name: Name,
    version: Annotated[int, typer.Argument(min=1, help="version that becomes `latest`")],
    reason: Annotated[str, typer.Option(help="reason that the adapter's history shows")] = "rollback",
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Make an earlier version the latest; later versions remain and can be requested by number."""
    body = {"version": version, "reason": reason}
    answer = call(url, api_key, "POST", f"/v1/adapters/{segment(name)}/rollback", body)
    show_text(answer, as_json, plain(answer["message"]))


@app.command()
def delete(
    which: Annotated[str, typer.Argument(metavar="NAME@K", help="NAME alone, with --all: every version")],
    everything: Annotated[bool, typer.Option("--all", help="delete the adapter with all its versions")] = False,
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


@app.command()
def download(
    which: Annotated[str, typer.Argument(metavar="NAME@K", help="NAME alone: its latest version")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a new folder")],
    form: Annotated[str, typer.Option("--format", help="mlx-lm or peft")] = "mlx-lm",
    base: Annotated[str, typer.Option("--base", help="name of the base in the configuration, which PEFT loads")] = "",
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Write a version as an adapter directory for mlx-lm or PEFT."""
    from shared.adapter_files.export import Format, export  # it loads numpy, a fifth of any other command's time

    if form not in get_args(Format):
        fail(f"--format {form}: {' or '.join(get_args(Format))}", 2)
    try:
        check_free(folder)
        with TemporaryDirectory(prefix="parallm-adapter-") as temporary:
            file = Path(temporary) / "adapters.safetensors"
            manifest = _fetch(which, file, url, api_key)
            with whole_folder(folder) as partial:
                export(manifest, file, partial, "peft" if form == "peft" else "mlx-lm", base)
    except AdapterRejectedError as error:
        fail(f"{which}: {error}", 1)
    except (SetupError, OSError) as error:
        fail(str(error), 2)
    out.print(plain(f"{manifest.id}: {folder}"))


@app.command()
def merge(
    which: Annotated[str, typer.Argument(metavar="NAME@K|DIR", help="a version, or an adapter directory with a /")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="model folder to create")],
    model: Annotated[str, typer.Option("--model", "-m", help="base model: a folder or a hub name")],
    dequantize: Annotated[bool, typer.Option("--dequantize", help="write all weights unquantised")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run the Python code of the base's folder")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Merge a base and an adapter into a model folder that works without the adapter."""
    from shared.adapter_files.export import export  # as above

    flags = [*(["--dequantize"] if dequantize else []), *(["--trust-remote-code"] if trust_remote_code else [])]
    if "/" in which:
        raise typer.Exit(_merge(["--name", which, *flags, "--", model, which, str(folder)]))
    with TemporaryDirectory(prefix="parallm-adapter-") as temporary:
        file = Path(temporary) / "downloaded"
        manifest = _fetch(which, file, url, api_key)
        if manifest.network is not None:
            fail(f"{manifest.id} is a network and no adapter of a language model: there is nothing to merge", 1)
        if manifest.status == "rejected":
            fail(f"{manifest.id} failed its gate; download it and merge the folder if that is what you want", 1)
        adapter = Path(temporary) / "adapter"
        adapter.mkdir()
        try:
            export(manifest, file, adapter, "mlx-lm", model)
        except OSError as error:
            fail(f"{error.filename or adapter}: {error.strerror or error}", 2)
        file.unlink()
        made_for = ["--base-sha256", manifest.base_sha256] if manifest.base_sha256 else []
        code = _merge(["--name", manifest.id, *made_for, *flags, "--", model, str(adapter), str(folder)])
    raise typer.Exit(code)


def _fetch(which: str, file: Path, url: str, api_key: str) -> AdapterManifest:
    name, _, version = which.partition("@")
    if not name or ("@" in which and not (version.isdecimal() and 0 < int(version) < 10**9)):
        fail(f"{which}: give NAME@K, or NAME for its latest version", 2)

    async def fetch(client: BatchClient) -> AdapterManifest:
        manifest = await client.adapter_version(name, int(version or 0))
        await client.download_adapter(manifest, file)
        return manifest

    try:
        return ask(url, api_key, fetch)
    except OSError as error:
        fail(f"{error.filename or file}: {error.strerror or error}", 2)


def _merge(arguments: Sequence[str]) -> int:
    """The exit code of the process that merges; Ctrl-C reaches it, too, SIGTERM goes on to it, and it cleans up."""
    processes: list[subprocess.Popen[bytes]] = []
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True
        for process in processes:
            process.terminate()

    before = signal.signal(signal.SIGTERM, end)  # first: the process must not outlive a command ended at its start
    try:
        process = subprocess.Popen([sys.executable, "-P", "-m", "trainer.merging", *arguments])
        processes.append(process)
        if ended:
            process.terminate()
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)
    if code < 0:
        fail(f"the merge was ended by signal {-code}; of 9, the likeliest reason is that memory was short", 1)
    return code
