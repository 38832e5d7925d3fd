"""A real model learns from examples, then from a reward, over a ring: what it gets right of held-out prompts, by step.

`python -m tests.bench.learning --model MODEL [--seeds 0 1 2]` does what docs/how-to/teach-a-small-model.md does, once
for each seed: as many trainers share one ring, each with policies of its own. Figures go to `learning.json` and
`learning.png` in --out.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec

from api.demo.report import plotting
from api.demo.serving import stop
from examples.short_answers import reward, write
from shared.process.model_aliases import short_name
from tests.e2e.rings import ROOT, Ring, ring

RECIPES = ROOT / "trainer" / "recipes"
FOLDER = "short-answers"  # where the recipes look for data sets
KINDS = ("json", "words", "lines")
STAGES = {"base": "the model", "sft": "after examples", "grpo": "after rewards"}
NEW_TOKENS = 48  # as in the recipe
SHOWN = (
    "step", "train_step", "loss", "reward", "held_out", "held_out_right", "zero_variance", "overlong", "entropy",
    "mismatch", "update_rms", "completion_tokens", "wait_s", "train_s", "publish_s",
)  # fmt: skip
POLL_S = 0.2


class Stage(msgspec.Struct):
    """Greedy answers to held-out prompts over HTTP, after a stage of the run."""

    model: str
    reward: float
    right: float  # the share whose reward is 1
    rights: dict[str, float]  # by kind of task

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {right:.3f}" for kind, right in self.rights.items())
        return f"reward {self.reward:.3f}, right {self.right:.3f} ({kinds})"


class Course(msgspec.Struct):
    """One seed's run; seconds count from the start of its first trainer."""

    seed: int
    stages: dict[str, Stage] = msgspec.field(default_factory=dict)
    sft: list[dict[str, Any]] = msgspec.field(default_factory=list)  # lines of its metrics.jsonl, each with `at_s`
    grpo: list[dict[str, Any]] = msgspec.field(default_factory=list)
    seconds: dict[str, float] = msgspec.field(default_factory=dict)  # of each trainer, with its start

    def steps(self, stage: str) -> list[dict[str, Any]]:
        """Lines of one trainer."""
        return self.sft if stage == "sft" else self.grpo

    @property
    def held_out(self) -> list[tuple[int, float]]:
        """(train step, reward) of the evaluations of GRPO, 0: right before it."""
        measured = [(line["train_step"] + 1, line["held_out"]) for line in self.grpo if line["held_out"] is not None]
        return [(0, self.stages["sft"].reward), *measured]


class SeedRun:
    """The trainers of one seed, on a ring that others use, too."""

    def __init__(self, options: argparse.Namespace, seed: int, folder: Path, started: Ring) -> None:
        self._options, self._folder, self._ring = options, folder, started
        self._log = options.out / f"seed-{seed}.log"
        self._since = time.monotonic()
        self.course = Course(seed)

    def run(self, base: Stage) -> None:
        """Both trainers, one after the other, and what held-out prompts earn after each of them."""
        self.course.stages["base"] = base
        shown = self._train("sft", "shown", self._options.sft.split())
        self._ask("sft", shown)
        self._ask("grpo", self._train("grpo", "taught", [*self._options.grpo.split(), "--start-from", shown]))

    def _train(self, stage: str, name: str, flags: list[str]) -> str:
        """Run one trainer to its end, or to the end of the time; the version that it leaves."""
        adapter, run_dir, steps = f"{name}-{self.course.seed}", self._folder / "train", self.course.steps(stage)
        command = [sys.executable, "-m", "trainer", "--config", str(RECIPES / f"smollm2-{stage}.yaml")]
        command += ["--connect-to", self._ring.redis_url, "--model", str(self._options.model), "--adapter", adapter]
        command += ["--run-dir", str(run_dir), "--seed", str(self.course.seed), "--log-json", "true", *flags]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        began, ending = time.monotonic(), False
        with self._log.open("a") as log:
            trainer = subprocess.Popen(command, cwd=self._folder, env=environment, stdout=log, stderr=log)
            try:
                while trainer.poll() is None:
                    self._follow(stage, run_dir / adapter / "metrics.jsonl")
                    if not ending and time.monotonic() - self._since > 60 * self._options.minutes:
                        trainer.terminate()  # it ends its train step and saves
                        ending = True
                    time.sleep(POLL_S)
            finally:
                stop(trainer)
        self._follow(stage, run_dir / adapter / "metrics.jsonl")
        self.course.seconds[stage] = time.monotonic() - began
        if trainer.returncode or not steps:
            raise SystemExit(f"{adapter}: its trainer ended with {trainer.returncode}; see {self._log}")
        return f"{adapter}@{steps[-1]['version']}"

    def _follow(self, stage: str, metrics: Path) -> None:
        """Take in and print the new lines of the metrics."""
        steps = self.course.steps(stage)
        lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
        for text in lines[len(steps) :]:
            line = {**json.loads(text), "at_s": time.monotonic() - self._since}
            steps.append(line)
            parts = [f"{name} {line[name]:.3g}" for name in SHOWN if isinstance(line.get(name), float | int)]
            self._say(f"{stage}: {', '.join(parts)} {line.get('gate', '')}")

    def _ask(self, stage: str, model: str) -> None:
        found = asked(self._ring, model, self._folder)
        self.course.stages[stage] = found
        self._say(f"after {stage}, {model}: {found}")

    def _say(self, text: str) -> None:
        print(f"seed {self.course.seed} {time.monotonic() - self._since:6.1f} s  {text}", flush=True)


def asked(started: Ring, model: str, folder: Path) -> Stage:
    """Ask a model or a version the held-out prompts, as any client would, and judge what it answers."""
    lines = (folder / FOLDER / "held_out.jsonl").read_text().splitlines()
    tasks = [json.loads(line) for line in lines]
    answers = asyncio.run(answered(started.url, model, [task["prompt"] for task in tasks]))
    for task, answer in list(zip(tasks, answers, strict=True))[:: max(1, len(tasks) // 9)]:
        print(f"    {model}: {task['prompt'][0]['content']} -> {answer!r}", flush=True)
    kinds = [task["reference"]["kind"] for task in tasks]
    earned = [reward(answer, task["reference"])[0] for task, answer in zip(tasks, answers, strict=True)]
    of_kind = {kind: [each for at, each in zip(kinds, earned, strict=True) if at == kind] for kind in KINDS}
    rights = {kind: statistics.fmean(value == 1 for value in values) for kind, values in of_kind.items()}
    return Stage(model, statistics.fmean(earned), statistics.fmean(value == 1 for value in earned), rights)


async def answered(url: str, model: str, prompts: Sequence[Any]) -> list[str]:
    """Greedy answers to chats, all asked at once."""
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:

        async def one(messages: Any) -> str:
            body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": NEW_TOKENS}
            answer = await client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            text: str = answer.json()["choices"][0]["message"]["content"]
            return text

        return list(await asyncio.gather(*map(one, prompts)))


def draw(path: Path, courses: Sequence[Course]) -> None:
    """Write the picture: held-out reward of each seed over train steps, and the share of right answers by kind."""
    pyplot = plotting()
    figure, (curves, bars) = pyplot.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2))
    for course, color in zip(courses, ("#c2571a", "#3b6ea5", "#5b8a3c", "#777777"), strict=False):
        base = course.stages["base"].reward
        curves.plot(*zip(*course.held_out, strict=True), "o-", ms=3, color=color, label=f"seed {course.seed}")
        curves.plot([-8, 0], [base, course.held_out[0][1]], "o:", ms=3, color=color)
    curves.set_xlabel("GRPO train step (before 0: SFT)")
    curves.set_ylabel("mean reward of held-out prompts, greedy")
    curves.set_ylim(0, 1.02)
    curves.legend(loc="lower right")
    for at, (stage, color) in enumerate(zip(STAGES, ("#bbbbbb", "#3b6ea5", "#c2571a"), strict=True)):
        means = [statistics.fmean(course.stages[stage].rights[kind] for course in courses) for kind in KINDS]
        bars.bar(
            [place + 0.27 * (at - 1) for place in range(len(KINDS))], means, 0.25, color=color, label=STAGES[stage]
        )
    bars.set_xticks(range(len(KINDS)), ["JSON, a copied field", "exact words", "a list of n lines"])
    bars.set_ylabel("share of answers that are right")
    bars.set_ylim(0, 1.02)
    bars.legend(loc="upper center")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """1 if a run broke, or ended worse than it began."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--held-out", type=int, default=32, help="prompts of each kind that answers are asked to")
    parser.add_argument("--minutes", type=float, default=60, help="trainers are asked to end after so many")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--serve", default="", help="further flags for mlx_parallm_serve")
    parser.add_argument("--sft", default="", help="further flags for the trainer with examples")
    parser.add_argument("--grpo", default="", help="further flags for the trainer with rewards")
    options = parser.parse_args(argv)
    options.model = options.model.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    serve = ["--adapter-slots", str(4 * len(options.seeds)), "--max-batch-size", "512", *options.serve.split()]
    with tempfile.TemporaryDirectory(prefix="parallm-learning-") as given, ThreadPoolExecutor() as threads:
        folder = Path(given)
        write(folder / FOLDER, each_held_out=options.held_out)
        with ring(folder / "data", *serve, model=options.model) as started:
            base = asked(started, short_name(str(options.model)), folder)
            print(f"before: {base}", flush=True)
            runs = [SeedRun(options, seed, folder, started) for seed in options.seeds]
            ended = [threads.submit(run.run, base) for run in runs]
            errors = [error for each in ended if (error := each.exception()) is not None]
    courses = [run.course for run in runs if len(run.course.stages) == len(STAGES)]
    (options.out / "learning.json").write_bytes(msgspec.json.format(msgspec.json.encode(courses)) + b"\n")
    if courses:
        draw(options.out / "learning.png", courses)
    for error in errors:
        print(f"broken: {error}")
    worse = any(course.stages["grpo"].reward < course.stages["base"].reward for course in courses)
    return 1 if worse or errors else 0


if __name__ == "__main__":
    sys.exit(main())
