"""The real coding agents, unmodified, one task each: `python -m tests.clients.agents --path FOLDER ...`.

Each agent is started by `mlx_parallm launch` in a repository of two files, against a ring whose worker answers as a
good model would (tests/clients/scripted_model.py), so that reading, editing, running and the last answer all happen. An
agent passes if the file is edited, its own last words arrive, and the server has answered every request with 200.

With `--model FOLDER` the ring has a real worker with that model, and only the answers' status counts: a small model
does not know what to do. `--record FOLDER` keeps the requests' bodies.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.clients.recorder import recorder
from tests.clients.scripted_model import DONE, MODEL, RIGHT, TASK, WRONG
from tests.e2e.rings import Process, ring

TIMEOUT_S, MODEL_TIMEOUT_S = 900, 3600  # the second with a real model, which reads 8,000 tokens of instructions
MOST_TOKENS = 64  # of an answer of a real model
ARGUMENTS = {
    "claude": ("-p", TASK, "--allowedTools", "Bash,Read,Edit"),
    "codex": ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
    "opencode": ("run", TASK),
    "aider": ("--yes", "--no-git", "--no-auto-commits", "--analytics-disable", "--message", TASK, "calc.py"),
    "crush": ("run", "--quiet", TASK),
    "continue": ("-p", "--auto", TASK),
    "qwen-code": ("-p", TASK, "--yolo"),
}
PROGRAMS = {"qwen-code": "qwen", "continue": "cn"}


@dataclass
class Outcome:
    """What one agent did, and what the server and the worker say of it."""

    name: str
    version: str
    done: bool
    requests: int
    refused: list[str]
    cached: float | None  # of the prompts of later turns
    output: str

    @property
    def passed(self) -> bool:
        return self.done and not self.refused and self.requests > 0

    def row(self) -> str:
        cached = "" if self.cached is None else f"{self.cached:.0%}"
        refused = ", ".join(self.refused) or "none"
        shown = (self.name, self.version, "yes" if self.done else "no", str(self.requests), refused, cached)
        return f"| {' | '.join(shown)} |"


def repository(folder: Path) -> Path:
    """Two files, of which one is wrong, so that the other one fails."""
    folder.mkdir()
    (folder / "calc.py").write_text(f"def add(a, b):\n    {WRONG}\n")
    (folder / "test_calc.py").write_text('from calc import add\n\nassert add(2, 3) == 5\nprint("all right")\n')
    for command in (("init", "-q"), ("add", "-A"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def environment(home: Path, path: list[Path]) -> dict[str, str]:
    """Of an agent: programs, and a home of its own."""
    kept = {name: value for name, value in os.environ.items() if name in ("LANG", "TERM", "TMPDIR")}
    programs = os.pathsep.join([*map(str, path), os.environ["PATH"]])
    return {**kept, "PATH": programs, "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "CI": "1"}


def version_of(name: str, surroundings: dict[str, str]) -> str:
    program = shutil.which(PROGRAMS.get(name, name), path=surroundings["PATH"])
    if program is None:
        return ""
    told = subprocess.run([program, "--version"], env=surroundings, capture_output=True, text=True, check=False)
    words = [word for word in told.stdout.replace("v", " ").split() if word[:1].isdigit()]
    return words[0] if words else "?"


@contextlib.contextmanager
def worker_of(redis_url: str, folder: Path, model: Path | None, *flags: str) -> Iterator[Process | None]:
    """The scripted worker, unless the ring has a real one."""
    if model is not None:
        yield None
        return
    process = Process.start("tests.clients.scripted_model", "--redis", redis_url, "--folder", str(folder), *flags)
    process.wait_for_line("ready")
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait()


def run(
    name: str, path: list[Path], model: Path | None, record: Path | None, *, delegate: bool = False
) -> Outcome | None:
    """One agent's task; None if it is not installed."""
    with tempfile.TemporaryDirectory() as at, contextlib.ExitStack() as stack:
        folder = Path(at)
        surroundings = environment(folder, path)
        version = version_of(name, surroundings)
        if not version:
            return None
        work = repository(folder / "repository")
        flags = ("--max-request-bytes", "16000000", "--clamp-max-tokens")
        flags += () if model is not None else ("--workers", "0")
        server = stack.enter_context(ring(folder / "data", *flags, **({} if model is None else {"model": model})))
        worker = stack.enter_context(worker_of(server.redis_url, work, model, *(["--delegate"] if delegate else [])))
        url = server.url if record is None else stack.enter_context(recorder(server.url, record / name))
        launch = [sys.executable, "-m", "api.cli.main", "launch", name, "--url", url]
        launch += ["--model", MODEL] if model is None else ["--model", model.name, "--max-output", str(MOST_TOKENS)]
        launch += ["--", *ARGUMENTS[name]]
        root, timeout_s = Path(__file__).parents[2], TIMEOUT_S if model is None else MODEL_TIMEOUT_S
        try:
            done = subprocess.run(
                launch, cwd=work, env={**surroundings, "PYTHONPATH": str(root)}, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=timeout_s, check=False,
            )  # fmt: skip
            output = done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            output = f"no end after {timeout_s} s\n{error.stdout}\n{error.stderr}"
        edited = RIGHT in (work / "calc.py").read_text()
        if model is None:
            said = " ".join(output.split())
            whole = edited and DONE in said
        else:
            whole = True
        requests = answers(server.server)
        prompts = [] if worker is None else [json.loads(line) for line in worker.lines if line.startswith("{")]
        return Outcome(
            name,
            version,
            whole,
            len(requests),
            [f"{path} {status}" for path, status in requests if status >= 400],
            cached_share(prompts),
            output,
        )


def answers(server: Process) -> list[tuple[str, int]]:
    """Path and status of all requests but those of `launch` itself."""
    found = []
    for line in server.lines:
        if '"api.request"' in line and line.startswith("{"):
            told = json.loads(line)
            if told["method"] == "POST" or told["status"] >= 400:
                found.append((told["path"], told["status"]))
    return found


def cached_share(prompts: list[dict[str, int]]) -> float | None:
    """Share of later prompts that begin as an earlier one did, of those that are as long as a conversation's."""
    turns = [each for each in prompts if each["prompt"] > max(each["prompt"] for each in prompts) / 2]
    later = turns[1:]
    return sum(each["cached"] for each in later) / sum(each["prompt"] for each in later) if later else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, action="append", default=[], help="folder with programs of agents")
    parser.add_argument("--model", type=Path, help="folder of a real model; its answers make no sense")
    parser.add_argument("--record", type=Path, help="folder for the bodies of requests")
    parser.add_argument("--delegate", action="store_true", help="the scripted model has a sub-agent do the task")
    parser.add_argument("names", nargs="*", choices=[*ARGUMENTS, []], help="agents; default: all that are installed")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    for name in arguments.names or ARGUMENTS:
        outcome = run(
            name,
            [path.absolute() for path in arguments.path],
            arguments.model,
            arguments.record,
            delegate=arguments.delegate,
        )
        if outcome is None:
            print(f"skipped {name}: it is not on PATH", flush=True)
            continue
        outcomes.append(outcome)
        print(f"{'passed' if outcome.passed else 'FAILED'}  {name}", flush=True)
        if not outcome.passed:
            print(outcome.output[-4000:], flush=True)
    print("| agent | version | task done | requests | refused | later prompts that begin as an earlier one |")
    print("|---|---|---|---|---|---|")
    for outcome in outcomes:
        print(outcome.row(), flush=True)
    return 0 if outcomes and all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
