"""Rows that store and read their prompt once, over rows with copies: `python -m tests.bench.shared_prompts`.

Memory: samples of one prompt that are admitted where some copies fit, and the KV that the batch's arrays hold. Steps:
decode steps of rows of one prompt in both forms, in turn in one process, as ratios of their times, and the bytes of KV
that a step reads. Job: groups of samples through an engine with little memory, from the first prompt to the last token.
System: groups whose prompts begin with one system prompt, which is stored once, over the same stored for each group.
`--share-prompts auto` is what a worker does by itself; `always` and `off` force a form.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import mlx.core as mx
from msgspec import structs

from mlx_model.config import EngineConfig
from mlx_model.device import on_cpu
from mlx_model.kv.kinds import leaves
from mlx_model.kv.layout import layout_of
from mlx_model.loader import LoadedModel
from shared.process.worker_settings import SharePrompts
from shared.sequences import SamplingParams, SequenceClass, SequenceSpec
from tests.bench.adapters import SHAPES, random_model
from worker.engine import reserved
from worker.engine.batch import shared_prompts
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest

SAMPLES, PROMPT, ANSWER = 16, 2048, 256  # of the memory part
COPIES = 4  # that fit there
CONTEXT = 16_384
ROOM = 1024  # positions that a row may come to
FORMS = ("off", "auto", "always")  # the first one is what others are compared with


def model_of(shape: dict[str, Any], dtype: str) -> LoadedModel:
    """A model with random weights that counts its KV."""
    loaded = random_model(shape | {"max_position_embeddings": CONTEXT}, dtype)
    heads = shape["num_hidden_layers"] * shape["num_key_value_heads"]
    token = 2 * heads * shape["head_dim"] * getattr(mx, dtype).size
    card = structs.replace(loaded.card, kv_bytes_per_token=token, context_length=CONTEXT)
    return replace(loaded, card=card, kv=layout_of(loaded.model, 0, 64))


def samples(
    group: int, count: int, prompt: int, answer: int, system: int = 0, of: SequenceClass = "batch"
) -> list[RowRequest]:
    """Samples of one prompt of `prompt` ids, of which `system` are those of all groups; each of `answer` tokens."""
    ids = tuple(3 + (7919 * at + 31 * group * (at >= system)) % 4000 for at in range(prompt))
    return [
        RowRequest(
            SequenceSpec(
                f"{group}-{n}",
                "m",
                ids,
                SamplingParams(answer, n, temperature=1.0, ignore_eos=True),
                group=str(group),
                sequence_class=of,
            )
        )
        for n in range(count)
    ]


class Rows:
    """Rows of one prompt in an engine, past their prompt."""

    def __init__(
        self, loaded: LoadedModel, when: SharePrompts, rows: int, context: int, groups: int = 1, system: int = 0
    ) -> None:
        most = rows * groups
        config = EngineConfig("", max_rows=most, prefill_chunk=512, prefix_cache_bytes=0, share_prompts=when)
        self._engine = Engine(loaded, config)
        for group in range(groups):
            self._engine.submit(samples(group, rows, context, ROOM, system, "interactive"))
        while self._engine.batch.decoding < most:
            self._tokens()
        for _ in range(3):
            self._tokens()

    def _tokens(self) -> int:
        tokens = sum(len(event.tokens) for event in self._engine.turn().events)
        self._engine.settle()
        return tokens

    @property
    def read(self) -> int:
        """Bytes of KV that a step reads."""
        return read_bytes(self._engine)

    def step_ms(self, steps: int, now: Callable[[], float] = time.perf_counter) -> float:
        began = now()
        for _ in range(steps):
            self._tokens()
        return 1e3 * (now() - began) / steps


def read_bytes(engine: Engine) -> int:
    """Bytes of KV that lie before the ends of the rows that decode."""
    total = 0
    for leaf in leaves(engine.batch.cache[:-1]):
        total += sum(each.nbytes * leaf.size() // each.shape[2] for each in (leaf.keys, leaf.values))
        total += sum(each.nbytes for pair in getattr(leaf, "beginnings", {}).values() for each in pair)
    return total


def measure_memory(loaded: LoadedModel) -> None:
    limit = COPIES * (PROMPT + ANSWER) * loaded.card.kv_bytes_per_token
    fit = {}
    for when in ("off", "auto"):
        config = EngineConfig("", max_rows=64, prefill_chunk=512, prefix_cache_bytes=0, share_prompts=when)
        engine = Engine(replace(loaded, kv_limit_bytes=limit), config)
        engine.submit(samples(0, SAMPLES, PROMPT, ANSWER))
        held = decoded = rows = 0
        while decoded <= 0.9 * ANSWER * rows:  # until the first of them end
            decoded += sum(len(event.tokens) for event in engine.turn().events)
            held = max(held, read_bytes(engine) if engine.batch.cache else 0)
            rows = engine.stats().rows
        fit[when] = rows
        print(f"{when}: {fit[when]} of {SAMPLES} rows of {PROMPT:,} + {ANSWER}, {held / limit:.2f} of the limit read")
    print(f"rows in the same memory: {fit['auto'] / fit['off']:.1f}   aim: 4", flush=True)


def measure_steps(
    loaded: LoadedModel, forms: Sequence[SharePrompts], rows: int, context: int, rounds: int, steps: int
) -> None:
    batches = {when: Rows(loaded, when, rows, context) for when in forms}
    times: dict[SharePrompts, list[float]] = {when: [] for when in forms}
    for _ in range(rounds):
        for when, batch in batches.items():
            times[when].append(batch.step_ms(steps))
    for when in forms[1:]:
        ratios = sorted(one / copied for one, copied in zip(times[when], times["off"], strict=True))
        print(
            f"{rows} rows of {context:,}, {when}: step {ratios[0]:.2f} {median(ratios):.2f} {ratios[-1]:.2f}"
            f" ({median(times['off']):.1f} -> {median(times[when]):.1f} ms),"
            f" bytes read {batches[when].read / batches['off'].read:.3f}",
            flush=True,
        )


def measure_job(loaded: LoadedModel, prompts: int, prompt: int, answer: int, copies: int, rounds: int) -> None:
    """Groups of 16 come one after another, as a worker claims them, in an engine where so many copies fit."""
    limit = copies * (prompt + answer) * loaded.card.kv_bytes_per_token
    seconds: dict[SharePrompts, list[float]] = {"off": [], "auto": []}
    for _ in range(rounds):
        for when, taken in seconds.items():
            config = EngineConfig("", max_rows=64, prefill_chunk=512, share_prompts=when)
            engine = Engine(replace(loaded, kv_limit_bytes=limit), config)
            waiting = [each for group in range(prompts) for each in samples(group, SAMPLES, prompt, answer)]
            began = time.perf_counter()
            while waiting or engine.busy:
                while waiting and engine.stats().waiting < 2:
                    engine.submit([waiting.pop(0) for _ in range(min(len(waiting), SAMPLES))])
                engine.turn()
                engine.settle()
            taken.append(time.perf_counter() - began)
    ratios = sorted(one / off for one, off in zip(seconds["auto"], seconds["off"], strict=True))
    print(
        f"job of {prompts} x {SAMPLES}, {prompt:,} + {answer}, {copies} copies fit: time {ratios[0]:.2f}"
        f" {median(ratios):.2f} {ratios[-1]:.2f} ({median(seconds['off']):.1f} -> {median(seconds['auto']):.1f} s)",
        flush=True,
    )


def time_of_work() -> float:
    """Seconds that do not depend on what else a machine does: of its CPU, unless another device computes."""
    return time.process_time() if on_cpu() else time.perf_counter()


def measure_system(
    loaded: LoadedModel, groups: int, each: int, system: int, own: int, answer: int, rounds: int
) -> None:
    """Groups of `each` samples, of `system` + `own` ids, where one system prompt fits beside what rows have."""
    token = loaded.card.kv_bytes_per_token
    limit = token * (system + own + groups * own + groups * each * (answer + 1))
    most: dict[str, list[int]] = {"each": [], "once": []}
    held: dict[str, list[int]] = {"each": [], "once": []}
    seconds: dict[str, list[float]] = {"each": [], "once": []}
    parts = {"each": CONTEXT, "once": reserved.PART}  # longer ones than any prompt: nothing is in common
    for _ in range(rounds):
        for form, part in parts.items():
            reserved.PART = shared_prompts.PART = part
            config = EngineConfig("", max_rows=groups * each, prefill_chunk=512, share_prompts="auto")
            engine = Engine(replace(loaded, kv_limit_bytes=limit), config)
            for group in range(groups):
                engine.submit(samples(group, each, system + own, answer, system))
            rows = read = 0
            began = time_of_work()
            while engine.busy:
                engine.turn()
                engine.settle()
                rows = max(rows, engine.stats().rows)
                read = max(read, read_bytes(engine) if engine.batch.cache else 0)
            seconds[form].append(time_of_work() - began)
            most[form].append(rows)
            held[form].append(read)
    ratios = sorted(one / apart for one, apart in zip(seconds["once"], seconds["each"], strict=True))
    print(
        f"{groups} x {each} of {system:,} + {own} + {answer}, in {limit / token:,.0f} positions: rows at once"
        f" {max(most['each'])} -> {max(most['once'])}, KV read {max(held['each']) / limit:.2f} ->"
        f" {max(held['once']) / limit:.2f} of the limit, time {ratios[0]:.2f} {median(ratios):.2f} {ratios[-1]:.2f}"
        f" ({median(seconds['each']):.1f} -> {median(seconds['once']):.1f} s)",
        flush=True,
    )


def measure_system_steps(
    loaded: LoadedModel, groups: int, each: int, system: int, own: int, rounds: int, steps: int
) -> None:
    """Decode steps of such groups, in the same two forms and over copies."""
    parts = {"off": reserved.PART, "each": CONTEXT, "once": reserved.PART}
    batches = {}
    for form, part in parts.items():
        reserved.PART = shared_prompts.PART = part
        batches[form] = Rows(loaded, "off" if form == "off" else "always", each, system + own, groups, system)
    times: dict[str, list[float]] = {form: [] for form in parts}
    for _ in range(rounds):
        for form, batch in batches.items():
            times[form].append(batch.step_ms(steps, time_of_work))
    for form, over in (("each", "off"), ("once", "off"), ("once", "each")):
        ratios = sorted(one / other for one, other in zip(times[form], times[over], strict=True))
        print(
            f"{groups} x {each} of {system:,} + {own}, {form} over {over}: step {ratios[0]:.2f} {median(ratios):.2f}"
            f" {ratios[-1]:.2f} ({median(times[over]):.1f} -> {median(times[form]):.1f} ms),"
            f" bytes read {batches[form].read / batches[over].read:.3f}",
            flush=True,
        )


def main() -> None:
    """Memory, then steps, a job, and groups with one system prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="medium")
    parser.add_argument("--layers", type=int, default=0, help="of steps, job and system; 0: as the shape has")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, action="append", help="default: 2048")
    parser.add_argument("--job", type=int, nargs=4, default=(4, 512, 32, 12), help="prompts, their ids, tokens, copies")
    parser.add_argument(
        "--system",
        type=int,
        nargs=5,
        default=(16, 8, 1024, 128, 64),
        help="groups, samples, common ids, own ids, tokens",
    )
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="of the steps; off comes first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--only", choices=("memory", "steps", "job", "system", "system-steps"))
    parser.add_argument("--dtype", default="float32" if on_cpu() else "bfloat16")
    args = parser.parse_args()
    if args.only in (None, "memory"):
        measure_memory(model_of(SHAPES[args.shape] | {"num_hidden_layers": 2}, args.dtype))
    layers = {"num_hidden_layers": args.layers} if args.layers else {}
    loaded = model_of(SHAPES[args.shape] | layers, args.dtype)
    if args.only in (None, "steps"):
        for context in args.context or (2048,):
            measure_steps(loaded, args.forms, args.rows, context, args.rounds, args.steps)
    if args.only in (None, "job"):
        measure_job(loaded, *args.job, args.rounds)
    if args.only in (None, "system"):
        measure_system(loaded, *args.system, args.rounds)
    if args.only in (None, "system", "system-steps"):
        measure_system_steps(loaded, *args.system[:-1], args.rounds, args.steps)


if __name__ == "__main__":
    main()
