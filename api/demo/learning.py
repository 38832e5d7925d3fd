"""The act in which the model learns while it serves: a trainer joins the ring, and chats on its policy go on.

    python -m api.demo.learning            sixteen sums, learned by heart within two minutes, as in `make demo`
    python -m api.demo.learning --full     addition itself: held-out sums from 0.41 to 0.7 and above in ten minutes

Chats are streamed on `policy`, which moves to the newest version at the next decode step, and on `policy@1`, which
never changes. Not one of them may fail or break off. Figures over time go to `reward.png` and `learning.json`.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console

from api.demo.chats import ChatLog, chatting
from api.demo.curves import draw
from api.demo.report import spread
from api.demo.serving import MODEL, DemoRing, ring, stop

WHOLE_RECIPE = ["--config", "trainer/recipes/tiny-arithmetic.yaml"]
FEW_SUMS = ["--config", "trainer/recipes/tiny-fixed.yaml"]
POLICY = "policy"
GOAL = 0.7
ACT_S = 110.0  # of training, in `make demo`
FIRST_VERSION_S = 120.0
FEW, MANY = 16, 64  # sums: of the short act's data set, and asked by HTTP after the full recipe


@dataclass
class LearningCourse:
    """How a run went, as seen from outside; seconds count from the trainer's start."""

    before: float = 0.0  # held-out reward of the untrained policy
    steps: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl, each with `at_s`
    seconds: float = 0.0
    cpu_s: float = 0.0  # processor time of the trainer
    exit_code: int = 0

    @property
    def held_out(self) -> list[tuple[float, float]]:
        """(seconds, reward) of each evaluation, the first before training."""
        return [(0.0, self.before)] + [
            (step["at_s"], step["held_out"]) for step in self.steps if step["held_out"] is not None
        ]

    @property
    def after(self) -> float:
        """Held-out reward at the end of the run."""
        return self.held_out[-1][1]

    def reached(self, goal: float) -> float | None:
        """Seconds until the held-out reward first was the goal."""
        return next((at for at, reward in self.held_out if reward >= goal), None)


def main() -> int:
    """Run the act on a ring of its own; 0 when it learned and no chat broke."""
    parser = argparse.ArgumentParser(prog="python -m api.demo.learning", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--full", action="store_true", help="the whole recipe in place of two minutes")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    with (
        tempfile.TemporaryDirectory(prefix="parallm-demo-") as data_dir,
        ring(Path(data_dir), arguments.out / "serve.log", 1, console, "--max-batch-size", "128") as served,
    ):
        act = LearningAct(served, arguments.out, console, full=arguments.full, seed=arguments.seed)
        ok = asyncio.run(act.run(None if arguments.full else ACT_S))
    cpu_s = resource.getrusage(resource.RUSAGE_CHILDREN)
    console.print(f"  processor time of all processes: {cpu_s.ru_utime + cpu_s.ru_stime:.0f} s")
    return 0 if ok and (not arguments.full or act.course.after >= GOAL) else 1


class LearningAct:
    """One run of the trainer while chats are answered."""

    def __init__(self, served: DemoRing, out: Path, console: Console, *, full: bool = False, seed: int = 0) -> None:
        self._served = served
        self._out = out
        self._console = console
        self._sums = sums(MANY if full else FEW)
        recipe = WHOLE_RECIPE if full else _few_sums(out / "sums.jsonl", self._sums)
        self._flags = ["--seed", str(seed), *recipe]
        self._measured = "held-out sums" if full else f"the {FEW} sums of sums.jsonl"
        self.course = LearningCourse()

    async def run(self, seconds: float | None = ACT_S) -> bool:
        """Train (for so long at most, or to the recipe's end), chat meanwhile, report; whether all went well."""
        with tempfile.TemporaryDirectory(prefix="parallm-train-") as run_dir:
            metrics = Path(run_dir) / POLICY / "metrics.jsonl"
            with self._trainer(run_dir) as trainer:
                began = time.monotonic()
                await self._first_version(trainer)
                async with chatting(self._served.url, (POLICY, f"{POLICY}@1"), 0.25, began) as chats:
                    await self._watch(trainer, metrics, began, seconds, chats)
        self._report(chats, await self._ask_sums())
        return self.course.exit_code == 0 and not chats.broken and bool(self.course.steps)

    @contextlib.contextmanager
    def _trainer(self, run_dir: str) -> Iterator["subprocess.Popen[str]"]:
        command = [sys.executable, "-m", "trainer", "--connect-to", self._served.redis_url, "--log-json", "true"]
        command += ["--model", f"models/{MODEL}", "--run-dir", run_dir, *self._flags]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with (self._out / "train.log").open("w") as log:
            environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
            trainer = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, text=True)
            try:
                yield trainer
            finally:
                self.course.exit_code = stop(trainer)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.course.cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    async def _first_version(self, trainer: "subprocess.Popen[str]") -> None:
        """Wait until the untrained policy is published and measured."""
        deadline = time.monotonic() + FIRST_VERSION_S
        while time.monotonic() < deadline and trainer.poll() is None:
            for line in (self._out / "train.log").read_text().splitlines():
                if '"run.started"' in line:
                    self.course.before = json.loads(line)["held_out"]
                    self._console.print(f"  {self._measured} right before training: {self.course.before:.3f}")
                    return
            await asyncio.sleep(0.1)
        raise SystemExit(f"the trainer did not start; see {self._out / 'train.log'}")

    async def _watch(
        self,
        trainer: "subprocess.Popen[str]",
        metrics: Path,
        began: float,
        seconds: float | None,
        chats: ChatLog,
    ) -> None:
        """Follow the metrics to the end of the run, which comes by itself or after so many seconds."""
        ending = False
        while True:
            ended = trainer.poll() is not None
            for line in _new_lines(metrics, len(self.course.steps)):
                step = {**json.loads(line), "at_s": time.monotonic() - began}
                self.course.steps.append(step)
                if step["held_out"] is not None:
                    self._show(step, chats)
            if ended:
                break
            if seconds is not None and not ending and time.monotonic() - began > seconds and self._evaluated():
                trainer.terminate()  # it ends its train step and saves
                ending = True
            await asyncio.sleep(0.1)
        self.course.seconds = time.monotonic() - began

    def _evaluated(self) -> bool:
        """True after the run's last train step was measured: the moment to stop a run whose time is over."""
        return bool(self.course.steps) and self.course.steps[-1]["held_out"] is not None

    def _show(self, step: dict[str, Any], chats: ChatLog) -> None:
        self._console.print(
            f"  {step['at_s']:5.0f} s  step {step['train_step'] + 1:3d}  reward {step['reward']:.3f}  "
            f"greedy {step['held_out']:.3f}  version {step['version']}  lag {step['lag_max']}  "
            f"{step['tokens_per_s']:.0f} tok/s  chats {len(chats.chats)}, broken {len(chats.broken)}"
        )

    async def _ask_sums(self) -> dict[str, int]:
        """How many of the same sums the first and the newest version get right, asked as any client would."""
        async with AsyncOpenAI(base_url=f"{self._served.url}/v1", api_key="none", max_retries=0) as openai:

            async def right(model: str, question: str, wanted: str) -> bool:
                messages: Any = [{"role": "user", "content": question}]
                answer = await openai.chat.completions.create(
                    model=model, messages=messages, temperature=0, max_tokens=8
                )
                return answer.choices[0].message.content == wanted

            return {
                model: sum(await asyncio.gather(*(right(model, question, wanted) for question, wanted in self._sums)))
                for model in (f"{POLICY}@1", POLICY)
            }

    def _report(self, chats: ChatLog, right: dict[str, int]) -> None:
        course, console = self.course, self._console
        first = spread(chats.first_ms())
        reached = course.reached(GOAL)
        console.print(
            f"  {self._measured} right: [bold]{course.before:.3f} before, {course.after:.3f} after[/] "
            f"{len(course.steps)} train steps, {course.seconds:.0f} s (trainer: {course.cpu_s:.0f} s of processor time)"
            + (f", {GOAL} after {reached:.0f} s" if reached is not None else "")
        )
        for model, count in right.items():
            console.print(f"  asked by HTTP, {len(self._sums)} sums: {model} gets {count} right")
        console.print(
            f"  chats meanwhile: {len(chats.chats)}, failed or broken off: {len(chats.broken)}, "
            f"time to first token p50 {first['p50']:.0f} ms, p99 {first['p99']:.0f} ms"
        )
        for chat in chats.broken[:5]:
            console.print(f"    [red]{chat.model} at {chat.at_s:.1f} s: {chat.error}[/]")
        draw(self._out / "reward.png", course.steps, course.held_out, chats.chats, GOAL, self._measured)
        (self._out / "learning.json").write_text(
            json.dumps(_summary(course, chats, {"of": len(self._sums), **right}), indent=2) + "\n"
        )
        console.print(f"  written to {self._out}/: learning.json, reward.png, train.log")


def _summary(course: LearningCourse, chats: ChatLog, right: dict[str, int]) -> dict[str, Any]:
    return {
        "held_out": {"before": course.before, "after": course.after, "reached_goal_s": course.reached(GOAL)},
        "sums_right_by_http": right,
        "train_steps": len(course.steps),
        "seconds": round(course.seconds, 1),
        "trainer_cpu_s": round(course.cpu_s, 1),
        "chats": {
            "streamed": len(chats.chats),
            "broken": [chat.error for chat in chats.broken],
            "first_token_ms": {model: spread(chats.first_ms(model)) for model in (POLICY, f"{POLICY}@1")},
            "swapped_in_mid_answer": sum(len(chat.versions) > 1 for chat in chats.chats),
        },
        "steps": course.steps,
    }


def sums(count: int) -> list[tuple[str, str]]:
    """Two-digit additions as questions, with their answers."""
    draw_from = random.Random(1)
    pairs = [(draw_from.randint(10, 99), draw_from.randint(10, 99)) for _ in range(count)]
    return [(f"What is {a} + {b}?", str(a + b)) for a, b in pairs]


def _few_sums(path: Path, questions: list[tuple[str, str]]) -> list[str]:
    """A data set of one's own and a reward: what a user would give."""
    lines = [{"prompt": [{"role": "user", "content": question}], "reference": wanted} for question, wanted in questions]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [*FEW_SUMS, "--task", "jsonl", "--dataset", str(path), "--held-out-dataset", str(path), "--reward", "exact"]


def _new_lines(path: Path, known: int) -> list[str]:
    """Whole lines of a growing file, after the first `known` ones."""
    if not path.exists():
        return []
    return path.read_text().split("\n")[:-1][known:]


if __name__ == "__main__":
    sys.exit(main())
