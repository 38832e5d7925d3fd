"""Nights with a simulated user: what corrections alone teach, what is forgotten, and what the gate keeps out.

    python -m tests.bench.nights --seeds 0 1 2

Each seed has a ring of its own. By day the user talks (tests/training/simulated_user.py), at night a run learns from it
with the settings of `trainer/recipes/night.yaml`, but for those given here; its candidate is promoted if the gate has
passed one. Satisfaction is measured on greetings that were never said, sums on ones that were never asked. With
`--poisoner` one more user talks by day, with verdicts on sums the wrong way round.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.e2e.rings import Process, Ring, ring
from tests.training.simulated_user import SimulatedUser, Sum, sums
from tests.waiting import HANG_S
from trainer.night.morning import report_of
from trainer.night.school import begin
from trainer.settings import TrainSettings

MAX_TOKENS = 16


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--nights", type=int, default=6)
    parser.add_argument("--sessions", type=int, default=80)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--rehearse", type=int, default=120, help="sums whose replies are rehearsed; 0: none")
    parser.add_argument("--measured-sums", type=int, default=100)
    parser.add_argument("--poisoner", action="store_true")
    options = parser.parse_args(argv)
    print("| seed | night | satisfied by day | satisfied, held out | sums right | suite | KL | outcome |")
    print("|---|---|---|---|---|---|---|---|")
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as root, ring(Path(root, "data"), "--feedback-ttl-days", "1") as served:
            asyncio.run(_nights(served, Path(root), seed, options))


async def _nights(served: Ring, root: Path, seed: int, options: argparse.Namespace) -> None:
    asked = sums(options.measured_sums, 1_000 + seed)
    _write(root / "suite.jsonl", sums(100, 2_000 + seed))
    _write(root / "rehearsal.jsonl", sums(options.rehearse, 3_000 + seed))
    model, latest, since_ms = "tiny", 0, 0
    for night in range(1, options.nights + 1):
        async with SimulatedUser(served.url, model=model, seed=100 * seed + night) as user:
            if night == 1:
                print(f"| {seed} | before | | {await _measured(user, model, asked)} | | | |", flush=True)
            by_day = await user.talk(options.sessions)
        if options.poisoner:
            poisoner = SimulatedUser(served.url, word="winter", model=model, seed=100 * seed + night, poisons=True)
            async with poisoner as one:
                await one.talk(options.sessions, sum_share=0.9)
        settings = _settings(served, root, f"night-{seed}-{night}", latest, since_ms, options)
        begun = begin(settings.folder, latest)
        trainer = Process.start("trainer.__main__", *_flags(settings))
        await asyncio.to_thread(trainer.wait)
        report = report_of(settings, begun, None)
        if report.version:
            await asyncio.to_thread(_promote, served, report.version)
            model, latest, since_ms = f"policy@{report.version}", report.version, begun.began_ms
        async with SimulatedUser(served.url, model=model) as user:
            measured = await _measured(user, model, asked)
        suite = f"{report.suite_before or 0:.2f} to {report.suite_after or 0:.2f}"
        kl, said = report.base_kl or 0.0, f"{report.outcome} {report.why or report.version}"
        print(f"| {seed} | {night} | {by_day:.2f} | {measured} | {suite} | {kl:.2f} | {said} |", flush=True)
        if report.outcome not in ("proposed", "rejected"):
            raise SystemExit(trainer.output[-4000:])


def _promote(served: Ring, version: int) -> None:
    url = f"{served.url}/v1/adapters/policy/promote"
    httpx.post(url, json={"version": version}, timeout=HANG_S).raise_for_status()


async def _measured(user: SimulatedUser, model: str, asked: Sequence[Sum]) -> str:
    return f"{await user.satisfaction(model):.2f} | {await user.right_sums(model, asked):.2f}"


def _settings(
    served: Ring, root: Path, run: str, latest: int, since_ms: int, options: argparse.Namespace
) -> TrainSettings:
    steps, start = options.steps, f"policy@{latest}" if latest else ""
    given = {
        "connect_to": served.url, "model": "models/tiny", "mode": "distill", "dataset": Path("sessions:policy"),
        "teacher": start or "tiny", "candidate": True, "suite": root / "suite.jsonl", "max_tokens": MAX_TOKENS,
        "reward_margin": 0.05, "max_base_kl": 1.0, "steps": steps, "evaluate_every": steps, "checkpoint_every": 20,
        "prompts_per_step": 16, "learning_rate": options.learning_rate, "warmup_steps": 5, "schedule": "linear",
        "lessons_since_ms": since_ms, "run_dir": root / "runs",
        "run": run, "start_from": start,
    }  # fmt: skip
    if options.rehearse:
        given["rehearsal"] = root / "rehearsal.jsonl"
    return TrainSettings.model_construct(**(TrainSettings().model_dump() | given))


def _flags(settings: TrainSettings) -> list[str]:
    """The settings that are not what they are by default, as flags."""
    flags: list[str] = []
    for name, field in TrainSettings.model_fields.items():
        value = getattr(settings, name)
        if value != field.get_default(call_default_factory=True):
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return flags


def _write(file: Path, lines: Sequence[Sum]) -> None:
    tasks = ({"prompt": [{"role": "user", "content": each.question}], "reference": each.answer} for each in lines)
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))


if __name__ == "__main__":
    main()
