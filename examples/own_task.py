r"""A task of your own, with a reward of your own: from nothing to a rising curve, by one command.

    python examples/own_task.py --model models/tiny

It starts a server, writes the tasks to a file, trains on them with the reward below, draws the curve, and asks the
model as it was and as it is now. `--url` takes a server that runs already. To make it yours, replace `tasks` and
`reward`.

The tiny model has never read of legs, and answers most things with a number: there is something to learn.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

BIN = Path(sys.executable).parent  # where mlx_parallm_serve and mlx_parallm_train were installed
Task = dict[str, Any]  # {"prompt": a text or chat messages, "reference": what the reward compares an answer with}


LEGS = {"cats": 4, "birds": 2, "ants": 6, "spiders": 8}


def tasks() -> list[Task]:
    """Questions, each with its right answer, which may be any JSON."""
    return [
        {"prompt": [{"role": "user", "content": f"How many legs have {count} {animal}?"}], "reference": count * legs}
        for animal, legs in LEGS.items()
        for count in (2, 3, 5)
    ]


def reward(completion: str, reference: int) -> tuple[float, dict[str, float]]:
    """1 for the right number, less with its distance, 0 for no number.

    The answers to one question are compared with each other. If all of them earned 0 there would be nothing to learn,
    so a step in the right direction earns a part. The named parts stand in the log and on the dashboard.
    """
    if not completion.isdecimal():
        return 0.0, {"number": 0.0, "right": 0.0}
    distance = abs(int(completion) - reference)
    return max(0.0, 1 - distance / 20), {"number": 1.0, "right": float(distance == 0)}


def main() -> None:
    """Serve, train, and show the curve."""
    parser = argparse.ArgumentParser(description="train on a task of one's own")
    parser.add_argument("--model", default="models/tiny", help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("--url", help="a server of this model that runs; without it one is started")
    parser.add_argument("--adapter", default="legs", help="the name of the trained model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("own-task"), help="tasks, checkpoints and figures")
    options = parser.parse_args()

    data = options.folder / "tasks.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps(task) + "\n" for task in tasks()))
    with server(options.model, options.url, options.folder / "server.log") as url:
        train(url, options.adapter, data, options.folder, options.steps)
        draw([line["reward"] for line in read(options.folder / options.adapter / "metrics.jsonl")])
        for model in (Path(options.model).name, options.adapter):
            rewards = [reward(ask(url, model, task), task["reference"])[0] for task in tasks()]
            print(f"{model}'s likeliest answers: mean reward {sum(rewards) / len(rewards):.2f}")


@contextmanager
def server(model: str, url: str | None, log: Path) -> Iterator[str]:
    """The address of a server: the one given, or one that runs until the end of the block."""
    if url:
        yield url
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [BIN / "mlx_parallm_serve", "--model", model, "--port", str(port)]
    with tempfile.TemporaryDirectory() as data_dir, log.open("w") as lines:
        program = subprocess.Popen([*command, "--data-dir", data_dir], stdout=subprocess.PIPE, stderr=lines, text=True)
        try:
            assert program.stdout is not None
            if not any("ParaLLM is ready" in line for line in program.stdout):
                raise SystemExit(f"the server did not start: {log} says why")
            yield f"http://127.0.0.1:{port}"
        finally:
            program.terminate()
            program.communicate()


def ask(url: str, model: str, task: Task) -> str:
    """The model's likeliest answer."""
    body = {"model": model, "messages": task["prompt"], "temperature": 0, "max_tokens": 5}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def train(url: str, adapter: str, data: Path, folder: Path, steps: int) -> None:
    """Run the trainer: in each step it asks for answers, scores them with `reward`, learns, and publishes a version."""
    where = Path(__file__)
    run = ["--connect-to", url.removeprefix("http://"), "--adapter", adapter, "--replace-latest"]
    run += ["--run-dir", str(folder), "--steps", str(steps)]
    task = ["--task", "jsonl", "--dataset", str(data), "--reward", f"{where.stem}:reward", "--max-tokens", "5"]
    size = ["--prompts-per-step", "12", "--group-size", "16", "--lora-rank", "16", "--lora-scale", "2"]
    command = [BIN / "mlx_parallm_train", *run, *task, *size, "--learning-rate", "0.002"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(where.parent)}, check=True)


def read(path: Path) -> list[dict[str, Any]]:
    """One line of figures for each train step."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw(rewards: list[float]) -> None:
    """The curve: a line for each step."""
    for step, value in enumerate(rewards):
        print(f"step {step:3}  {value:.2f}  {'#' * round(50 * value)}")


if __name__ == "__main__":
    main()
