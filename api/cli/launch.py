"""`mlx_parallm launch NAME`: start a coding agent against this ring, with a configuration of its own for the run."""

import hashlib
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.agents import AGENTS, NO_KEY, CodingAgent, Served, Setup
from api.cli.client import DEFAULT_URL, InferenceClient
from api.cli.console import ApiKey, Model, Url, ask, err, fail, only_model

LEAST_CONTEXT = 16_384  # the instructions of most agents alone have 5,000 to 20,000 tokens
MOST_ANSWER = 32_768  # agents ask for so many at most
SHARE_OF_ANSWER = 4  # an answer may have one part in so many of the context


def launch(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(AGENTS)}")],
    arguments: Annotated[list[str] | None, typer.Argument(help="arguments for the agent, after --")] = None,
    model: Model = "",
    context: Annotated[
        int, typer.Option(min=0, help="context of the model in tokens; 0: what the model and the workers' memory allow")
    ] = 0,
    max_output: Annotated[int, typer.Option(min=0, help="most tokens of an answer; 0: a quarter of the context")] = 0,
    show: Annotated[bool, typer.Option("--print", help="print the settings and start nothing")] = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Start a coding agent that uses this server. The agent's own configuration files are not changed."""
    agent = AGENTS.get(name)
    if agent is None:
        fail(f"no agent is called '{name}'; there are {', '.join(AGENTS)}", 2)
    program = shutil.which(agent.program)
    if program is None and not show:
        fail(f"'{agent.program}' is not on PATH; `{agent.install}` installs it", 2)
    served = ask(url, api_key, lambda client: _served(client, url, api_key, model, context, max_output))
    folder = _folder(name, served)
    setup = agent.set_up(served, folder)
    command = [program or agent.program, *setup.arguments, *(arguments or ())]
    if show:
        _print(agent, setup, folder, command, served.key)
        return
    if served.context < LEAST_CONTEXT:
        err.print(
            f"warning: {served.model} has a context of {served.context} tokens here, and the instructions of most "
            f"agents alone take a large part of {LEAST_CONTEXT}"
        )
    _write(setup, folder)
    environment = {name: value for name, value in os.environ.items() if name not in setup.without}
    sys.stdout.flush()
    os.execve(command[0], command, {**environment, **setup.environment})


async def _served(client: InferenceClient, url: str, key: str, model: str, context: int, answer: int) -> Served:
    """The model to use and its limits; exit code 2 for one that is not served."""
    name = model or await only_model(client)
    found = next((each for each in await client.models() if each.id == name), None)
    if found is None:
        served = ", ".join(each.id for each in await client.models()) or "none"
        fail(f"model '{name}' is not served; there are: {served}", 2)
    most = found.context_length or found.max_model_len
    if context > most:
        fail(f"--context {context} is more than '{name}' has here: {most} tokens", 2)
    context = context or most
    answer = answer or max(1, min(MOST_ANSWER, context // SHARE_OF_ANSWER))
    if answer >= context:
        fail(f"--max-output {answer} leaves no room for a prompt in a context of {context} tokens", 2)
    from shared.process.settings import version  # loads a server's settings, which few commands need

    catalog = await client.call("GET", "/v1/models", dict[str, Any], client_version=version())
    shown = json.dumps({"models": catalog.get("models", [])}, indent=2) + "\n"
    return Served(url.rstrip("/").removesuffix("/v1"), key or NO_KEY, name, context, answer, shown)


def _folder(name: str, served: Served) -> Path:
    """Folder of an agent's configuration for one server and model. It stays, since agents keep their sessions there."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    which = hashlib.sha256(f"{served.url} {served.model}".encode()).hexdigest()[:8]
    return state / "mlx_parallm" / "launch" / f"{name}-{which}"


def _write(setup: Setup, folder: Path) -> None:
    """Files of a run, which may hold the key, so that nobody else may read them."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, text in setup.files.items():
            fresh = folder / f".{name}.{os.getpid()}"
            fresh.touch(mode=0o600)
            fresh.write_text(text)
            fresh.replace(folder / name)
    except OSError as error:
        fail(f"{folder}: {error.strerror}", 2)


def _print(agent: CodingAgent, setup: Setup, folder: Path, command: list[str], key: str) -> None:
    """Settings that would be made, without the key."""

    def hidden(text: str) -> str:
        return text if key == NO_KEY else text.replace(key, "...")

    for name in setup.without:
        print(f"unset {name}")
    for name, value in setup.environment.items():
        print(f"export {name}={shlex.quote(hidden(value))}")
    for name, text in setup.files.items():
        print(f"# {folder / name}\n{hidden(text).rstrip()}")
    print(shlex.join(command))
