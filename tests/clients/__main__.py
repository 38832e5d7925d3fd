"""Real clients, unmodified, against a real ring: `make clients`, or `python -m tests.clients --python VENV/bin/python`.

Starts `mlx_parallm_serve` with the tiny model (at last a worker with one that sees, too, for `images_` scripts) and
runs each script of tests/clients/scripts with the interpreter that has the clients (tests/clients/requirements.txt),
and those for Node where `--node` names a folder with their packages.
A script proves what its docstring says, and exits 0 when it holds. The load generator brings PyTorch along, so it has a
requirements file of its own (requirements-load.txt), and its script is skipped where it is not installed; so are those
of openai-agents (requirements-agents.txt), a trainer with the packages of `--logger` (requirements-loggers.txt), and
Open WebUI (requirements-webui.txt), Tinker's SDK (requirements-tinker.txt) and its cookbook
(requirements-cookbook.txt), beside which a training service runs. Scripts named `loops_` run tool loops and typed
answers against a worker that obeys (tests/clients/obedient.py), as no small model does.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.clients.scripted_model import MODEL as SCRIPTED
from tests.e2e.rings import MODEL, ROOT, Process, Ring, ring

ALIASES = ("claude-*", "meta-llama/Llama-3.2-1B")  # names that a client insists on
EYES = "tiny-vision"
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 3600
# Scripts whose client is not in requirements.txt: it is heavy, or its pins do not go with those of others.
NEEDS = {
    "guidellm_load": "guidellm",
    "open_webui": "open_webui",
    "openai_agents_sessions": "agents",
    "train_loggers": "trackio",
    "tinker_train": "tinker",
    "images_tinker": "tinker",
    "tinker_recipes": "tinker_cookbook",
}
APART = {
    "guidellm": "requirements-load.txt",
    "open_webui": "requirements-webui.txt",
    "agents": "requirements-agents.txt",
    "trackio": "requirements-loggers.txt",
    "tinker": "requirements-tinker.txt",
    "tinker_cookbook": "requirements-cookbook.txt",
}


def run(script: Path, python: str, node: Path | None, url: str, model: str = MODEL) -> bool:
    """Whether the script passes; its output is shown when it does not."""
    environment = {
        **os.environ,
        "PARALLM_URL": url,
        "PARALLM_MODEL_NAME": model,
        "PARALLM_MODEL_DIR": str(ROOT / "models" / MODEL),
        "PARALLM_EYES_DIR": str(ROOT / "models" / EYES),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }
    if script.suffix == ".mjs":
        assert node is not None
        script = Path(shutil.copy(script, node.absolute()))  # Node looks for packages beside the script
    command = ["node" if script.suffix == ".mjs" else python, str(script)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=SCRIPTS)
    except subprocess.TimeoutExpired as error:
        print(f"FAILED  {script.name}: no end after {TIMEOUT_S} s\n{error.stdout}\n{error.stderr}", flush=True)
        return False
    passed = done.returncode == 0
    lines = done.stdout.strip().splitlines() or [""]
    print(f"{'passed' if passed else 'FAILED'}  {script.name:24s} {lines[-1]}", flush=True)
    for row in (line for line in lines if line.startswith("|")):  # of a table
        print(f"        {row}", flush=True)
    if not passed:
        print(done.stdout[-3000:], done.stderr[-5000:], sep="\n", flush=True)
    return passed


def has(python: str, package: str) -> bool:
    """Whether an interpreter has a package."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


@contextlib.contextmanager
def obedient(server: Ring) -> Iterator[None]:
    """A worker that does what a chat says."""
    process = Process.start("tests.clients.scripted_model", "--redis", server.redis_url, "--obey")
    try:
        process.wait_for_line("ready")
        yield
    finally:
        process.popen.kill()
        process.popen.wait()


@contextlib.contextmanager
def beside(server: Ring, module: str, model: str, ready: str) -> Iterator[None]:
    """Another process of the ring, once it has said that it is ready; it ends in order."""
    process = Process.start(module, "--redis", server.redis_url, "--model", f"models/{model}")
    try:
        process.wait_for_line(ready)
        yield
    finally:
        code = process.stop()
    assert code == 0, process.output


def main() -> int:
    """Run the scripts; 1 when one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the clients")
    parser.add_argument("--node", type=Path, help="folder in which `npm install openai` was run; without it: no Node")
    parser.add_argument("names", nargs="*", help="scripts to run; default: all")
    arguments = parser.parse_args()
    kinds = (".py", ".mjs") if arguments.node else (".py",)
    scripts = sorted(path for path in SCRIPTS.iterdir() if path.suffix in kinds)
    chosen = [path for path in scripts if not arguments.names or path.stem in arguments.names]
    if not chosen:
        parser.error(f"no such script; there are: {', '.join(path.stem for path in scripts)}")
    # The scripts run in a folder of their own. Links stay: an environment's interpreter is one, and has its packages.
    python = str(Path(found).absolute()) if (found := shutil.which(arguments.python)) else arguments.python
    absent = [path for path in chosen if path.stem in NEEDS and not has(python, NEEDS[path.stem])]
    for path in absent:
        print(f"skipped {path.name:24s} needs tests/clients/{APART[NEEDS[path.stem]]}", flush=True)
    chosen = [path for path in chosen if path not in absent]
    trains = any(path.stem.startswith("tinker_") for path in chosen)
    seeing = [path for path in chosen if path.stem.startswith("images_")]
    looping = [path for path in chosen if path.stem.startswith("loops_")]
    with (
        tempfile.TemporaryDirectory() as folder,
        ring(Path(folder), *(f"--model-alias={name}={MODEL}" for name in ALIASES)) as server,
        beside(server, "trainer.service", MODEL, r"learners\.ready") if trains else contextlib.nullcontext(),
    ):
        passed = [
            run(script, python, arguments.node, server.url) for script in chosen if script not in [*seeing, *looping]
        ]
        if looping:
            with obedient(server):
                passed += [run(script, python, arguments.node, server.url, SCRIPTED) for script in looping]
        if seeing:  # behind the others, which expect one model
            learns = any(path.stem == "images_tinker" for path in seeing)
            with (
                beside(server, "worker", EYES, r"worker\.ready"),
                beside(server, "trainer.service", EYES, r"learners\.ready") if learns else contextlib.nullcontext(),
            ):
                passed += [run(script, python, arguments.node, server.url) for script in seeing]
    print(f"{sum(passed)} passed, {len(passed) - sum(passed)} failed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
