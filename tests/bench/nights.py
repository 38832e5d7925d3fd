"""Nights with simulated users: what corrections alone teach, what is forgotten, and what the gate keeps out.

    python -m tests.bench.nights --seeds 0 1 2
    python -m tests.bench.nights --seeds 0 1 2 --model FOLDER        # a real model, such as SmolLM2-135M-Instruct

Each seed has a user and a policy of its own on one ring. By day the user talks (tests/training/simulated_user.py), at
night a run learns from it with the settings of `trainer/recipes/night.yaml`, but for those given here; its candidate is
promoted if the gate has passed one. Satisfaction is measured on questions that were never asked. With `--poisoned` one
more user talks by day, with verdicts on tasks the wrong way round. Figures go to `nights.json` in --out as they come.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import yaml
from safetensors.numpy import save

from shared.process.model_aliases import short_name
from tests.e2e.rings import ROOT, Process, Ring, ring
from tests.training.simulated_user import SimulatedUser
from tests.training.wishes import Brief, Greeting, Task, Wish
from tests.waiting import HANG_S
from trainer.night.morning import report_of
from trainer.night.school import begin
from trainer.settings import TrainSettings

TINY = Path("models/tiny")
RECIPE = yaml.safe_load((ROOT / "trainer" / "recipes" / "night.yaml").read_text())


class Night(msgspec.Struct):
    """One seed's figures after a night; night 0: before the first one."""

    seed: int
    night: int
    satisfied: float  # share of replies to questions that were never asked
    right: float  # share of tasks, greedy
    by_day: float | None = None  # the day before
    suite_before: float | None = None
    suite_after: float | None = None
    base_kl: float | None = None
    outcome: str = ""
    why: str = ""
    refused: int = 0  # versions, by the gate
    learned_from: dict[str, int] = {}
    seconds: float = 0.0
    samples: list[tuple[str, str, str]] = []  # prompt's end, reply before, reply after

    def __str__(self) -> str:
        said = [self.seed, self.night or "before", _shown(self.by_day), _shown(self.satisfied), _shown(self.right)]
        suite = f"{_shown(self.suite_before)} to {_shown(self.suite_after)}" if self.outcome else ""
        said += [suite, _shown(self.base_kl), f"{self.outcome} {self.why}".strip(), f"{self.seconds:.0f}"]
        return "| " + " | ".join(map(str, said)) + " |"


class Course:
    """One seed: its user, its policy, its nights."""

    def __init__(self, served: Ring, root: Path, seed: int, options: argparse.Namespace, results: list[Night]) -> None:
        self._served, self._root, self._seed, self._options, self._results = served, root, seed, options, results
        self._wish: Wish = Greeting() if options.model == TINY else Brief()
        self._policy, self._base = f"night-{seed}", short_name(str(options.model))
        self._measured = self._wish.tasks(options.measured_tasks, 1_000 + seed, held_out=True)

    async def run(self, ends_at: float) -> None:
        """All nights that can end before a time of the monotonic clock."""
        options, wish = self._options, self._wish
        folder = self._root / self._policy
        folder.mkdir()
        _write(folder / "suite.jsonl", wish.tasks(options.suite_tasks, 2_000 + self._seed, held_out=True))
        _write(folder / "rehearsal.jsonl", wish.tasks(options.rehearse, 3_000 + self._seed))
        latest, since_ms, longest_s = await asyncio.to_thread(self._publish_base), 0, 0.0
        await self._note(Night(self._seed, 0, *await self._figures(latest)))
        for night in range(1, options.nights + 1):
            began = time.monotonic()
            if began + longest_s > ends_at:
                print(f"seed {self._seed}: no time for night {night}", flush=True)
                return
            by_day = await self._day(night, latest)
            settings = self._settings(night, latest, since_ms)
            begun = begin(settings.folder, latest if latest > 1 else 0)
            refused = await self._learn(settings, ends_at)
            report = report_of(settings, begun, None)
            if report.outcome == "unfinished":
                print(f"seed {self._seed}: night {night} has not ended in time", flush=True)
                return
            if report.version:
                await asyncio.to_thread(self._promote, report.version)
                latest, since_ms = report.version, begun.began_ms
            figures = await self._figures(latest)
            longest_s = max(longest_s, time.monotonic() - began)
            counts = {name: getattr(report, name) for name in ("corrected", "content", "rows", "rehearsed")}
            samples = [(each.prompt[-200:], each.before[:200], each.after[:200]) for each in report.samples]
            await self._note(
                Night(
                    self._seed, night, *figures, by_day, report.suite_before, report.suite_after, report.base_kl,
                    report.outcome, report.why, refused, counts, time.monotonic() - began, samples,
                )
            )  # fmt: skip

    async def _note(self, night: Night) -> None:
        self._results.append(night)
        print(night, flush=True)
        for prompt, before, after in night.samples[:2]:
            print(f"    {prompt!r}: {before!r} -> {after!r}", flush=True)
        file = self._options.out / "nights.json"
        await asyncio.to_thread(file.write_bytes, msgspec.json.format(msgspec.json.encode(self._results)) + b"\n")

    async def _day(self, night: int, latest: int) -> float:
        model, seed, sessions = f"{self._policy}@{latest}", 100 * self._seed + night, self._options.sessions
        async with SimulatedUser(self._served.url, wish=self._wish, model=model, seed=seed) as user:
            by_day = await user.talk(sessions)
        if self._options.poisoned:
            poisoner = SimulatedUser(self._served.url, wish=self._wish, model=model, seed=seed, poisons=True)
            async with poisoner as one:
                await one.talk(self._options.poisoned, task_share=0.9)
        return by_day

    async def _figures(self, latest: int) -> tuple[float, float]:
        model = f"{self._policy}@{latest}"
        async with SimulatedUser(self._served.url, wish=self._wish, model=model) as user:
            return await user.satisfaction(model, self._options.samples), await user.right(model, self._measured)

    async def _learn(self, settings: TrainSettings, ends_at: float) -> int:
        log = self._options.out / f"{self._policy}.log"
        trainer = Process.start("trainer.__main__", *_flags(settings))
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(trainer.popen.wait), max(1.0, ends_at - time.monotonic()))
        finally:
            code = await asyncio.to_thread(trainer.stop)
            with log.open("a") as file:
                file.write(trainer.output)
        if code:
            print(f"seed {self._seed}: the run ended with {code}\n{trainer.output[-3000:]}", flush=True)
        return len(trainer.printed("version.rejected"))

    def _publish_base(self) -> int:
        """An adapter that changes nothing, under the policy's name: what the user asks before the first night."""
        hidden = json.loads((self._options.model / "config.json").read_text())["hidden_size"]
        module = "model.layers.0.mlp.gate_proj"
        width = json.loads((self._options.model / "config.json").read_text())["intermediate_size"]
        tensors = {
            f"{module}.lora_a": np.zeros((hidden, 1), np.float32),
            f"{module}.lora_b": np.zeros((1, width), np.float32),
        }
        config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 1, "scale": 1.0, "dropout": 0.0}}
        files = {
            "adapter": ("adapters.safetensors", save(tensors)),
            "config": ("adapter_config.json", json.dumps(config).encode()),
        }
        url = f"{self._served.url}/upload_adapter"
        answer = httpx.post(url, data={"name": self._policy}, files=files, timeout=HANG_S).raise_for_status()
        return int(answer.json()["policy_version"])

    def _promote(self, version: int) -> None:
        url = f"{self._served.url}/v1/adapters/{self._policy}/promote"
        httpx.post(url, json={"version": version}, timeout=HANG_S).raise_for_status()

    def _settings(self, night: int, latest: int, since_ms: int) -> TrainSettings:
        options, folder = self._options, self._root / self._policy
        start = f"{self._policy}@{latest}" if latest > 1 else ""
        given = {
            **RECIPE, "connect_to": self._served.url, "model": str(options.model), "dtype": options.dtype,
            "adapter": self._policy, "dataset": Path(f"sessions:{self._policy}"), "teacher": start or self._base,
            "start_from": start, "suite": folder / "suite.jsonl", "reward": "regex", "drafts": options.drafts,
            "max_tokens": self._wish.max_tokens, "steps": options.steps, "evaluate_every": options.evaluate_every,
            "checkpoint_every": 20, "prompts_per_step": options.prompts_per_step, "schedule": "linear",
            "learning_rate": options.learning_rate, "lessons_since_ms": since_ms, "min_lessons": 2, "seed": self._seed,
            "run_dir": folder, "run": f"{self._policy}-{night}",
        }  # fmt: skip
        given["warmup_steps"] = min(RECIPE["warmup_steps"], options.steps // 4)
        if options.rehearse:
            given["rehearsal"] = folder / "rehearsal.jsonl"
        return TrainSettings.model_construct(**(TrainSettings().model_dump() | given))


def _flags(settings: TrainSettings) -> list[str]:
    """The settings that are not what they are by default, as flags."""
    flags: list[str] = []
    for name, field in TrainSettings.model_fields.items():
        value = getattr(settings, name)
        if value != field.get_default(call_default_factory=True):
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return flags


def _write(file: Path, tasks: Sequence[Task]) -> None:
    lines = ({"prompt": [{"role": "user", "content": each.question}], "reference": each.pattern} for each in tasks)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _shown(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.2f}"


async def nights(served: Ring, root: Path, options: argparse.Namespace) -> list[Any]:
    """All seeds at the same time; the errors of those that broke."""
    results: list[Night] = []
    ends_at = time.monotonic() + 60 * options.minutes
    courses = (Course(served, root, seed, options, results).run(ends_at) for seed in options.seeds)
    ended = await asyncio.gather(*courses, return_exceptions=True)
    return [each for each in ended if each is not None]


def main(argv: list[str] | None = None) -> int:
    """1 if a seed broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--dtype", default="", help="of the base, in workers and trainers; default: the model's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--nights", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=80)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--evaluate-every", type=int, default=20, help="steps between two checks of the gate")
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--rehearse", type=int, default=120, help="tasks whose replies are rehearsed; 0: none")
    parser.add_argument("--suite-tasks", type=int, default=100)
    parser.add_argument("--measured-tasks", type=int, default=100)
    parser.add_argument("--samples", type=int, default=3, help="replies to each question that is held out")
    parser.add_argument("--poisoned", type=int, default=0, help="sessions a day of a user who poisons")
    parser.add_argument("--minutes", type=float, default=120, help="no night goes on after so many")
    parser.add_argument("--serve", default="", help="further flags for mlx_parallm_serve")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    slots = ["--adapter-slots", str(4 * len(options.seeds))]
    flags = [*slots, "--feedback-ttl-days", "1", *(["--dtype", options.dtype] if options.dtype else [])]
    with tempfile.TemporaryDirectory(prefix="parallm-nights-") as given:
        root = Path(given)
        began = time.monotonic()
        with ring(root / "data", *flags, *options.serve.split(), model=options.model) as served:
            print(f"ready after {time.monotonic() - began:.0f} s", flush=True)
            print("| seed | night | satisfied by day | held out | tasks right | suite | KL | outcome | seconds |")
            print("|---|---|---|---|---|---|---|---|---|", flush=True)
            try:
                broken = asyncio.run(nights(served, root, options))
            finally:
                (options.out / "server.log").write_text(served.server.output)
    for error in broken:
        print(f"broken: {error!r}", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
