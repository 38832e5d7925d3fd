"""Random schedules: whatever happens on the way, a sequence's tokens are its own and nothing is left behind."""

import random
from dataclasses import replace

import msgspec
import pytest

from mlx_model.loader import LoadedModel
from shared.sequences import SequenceSpec
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.kv_models import small
from worker.engine.batch import running_batch
from worker.engine.batch.parted_batch import PartedBatch
from worker.engine.batch.running_batch import RunningBatch


class Schedule:
    """Arrivals, cancels, pauses and restarts at random turns, from a seed."""

    def __init__(self, loaded: LoadedModel, seed: int) -> None:
        self.random = random.Random(seed)
        kv = loaded.card.kv_bytes_per_token
        tells_at_once = self.random.random() < 0.5
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(running_batch, "on_cpu", lambda: tells_at_once)
            self.bench = Bench(
                replace(loaded, kv_limit_bytes=kv * self.random.choice([400, 1 << 20])),
                max_rows=self.random.choice([2, 4, 16]),
                prefill_chunk=self.random.choice([4, 16, 64]),
                prefix_cache_bytes=self.random.choice([0, kv * 60, 1 << 28]),
                block_size=4,
                share_prompts=self.random.choice(["auto", "always"]),
            )
        self.specs: dict[str, SequenceSpec] = {}
        self.cancelled: set[str] = set()
        self.prompts = [prompt_of(length, seed=length) for length in (1, 2, 17, 40, 90)]

    @property
    def parts(self) -> list[RunningBatch]:
        """The batch, or those that it is made of."""
        batch = self.bench.engine.batch
        return batch.parts if isinstance(batch, PartedBatch) else [batch]

    def arrive(self) -> None:
        """A request with one sequence or three, whose prompt may begin like another's."""
        prompt = self.random.choice(self.prompts)
        if self.random.random() < 0.5:
            prompt = [*prompt[: self.random.randint(1, len(prompt))], *prompt_of(self.random.choice([0, 1, 6]), seed=7)]
        options = self.random.choice(
            [{}, {"temperature": 1.0}, {"presence_penalty": 0.5, "repetition_penalty": 1.2}, {"prompt_logprobs": 0}]
        )
        name, tokens = f"s{len(self.specs)}", self.random.choice([1, 2, 5, 12])
        group = [spec(f"{name}.{n}", prompt, group=name, max_tokens=tokens, seed=n, **options) for n in range(3)]
        of = self.random.choice(["interactive", "batch"])
        chosen = group if self.random.random() < 0.2 else group[:1]
        chosen = [msgspec.structs.replace(each, sequence_class=of) for each in chosen]
        self.specs |= {each.id: each for each in chosen}
        self.bench.submit(*chosen)

    def disturb(self) -> None:
        """Cancel somebody, pause or go on, have some rows go and come back, or begin again as for a new version."""
        engine, chance = self.bench.engine, self.random.random()
        if chance < 0.15 and self.specs:
            self.cancelled.add(seq := self.random.choice(list(self.specs)))
            engine.cancel(seq)
        elif chance < 0.2:
            engine.freeze(clear_cache=self.random.random() < 0.5)
        elif chance < 0.27:
            admitted = [row for row in engine.rows.values() if row.admitted]
            engine._restart(self.random.sample(admitted, len(admitted) // 2))
        elif chance < 0.4:
            self.come_back(self.random.sample(list(engine.rows), len(engine.rows) // 2))
        elif chance > 0.6:
            engine.thaw()

    def come_back(self, seqs: list[str]) -> None:
        """Set rows aside, and submit them again with what they have told."""
        self.bench.engine.set_aside(seqs)
        self.bench.turn()
        for seq in seqs:
            told = tuple(self.bench.events.get(seq, []))
            if not told or told[-1].finish is None:
                self.bench.submit(self.specs[seq], prior=told, attempt=2)

    def check(self) -> None:
        """A row is in exactly one place."""
        for batch in self.parts:
            batch.check()

    def run(self) -> None:
        """To the end of all."""
        for _ in range(30):
            for _ in range(self.random.choice([0, 0, 1, 1, 2])):
                self.arrive()
            self.disturb()
            self.bench.turn()
            self.check()
        self.bench.engine.thaw()
        self.bench.run(5000)


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "name"),
    [(0, "llama"), (1, "llama"), (2, "llama"), (3, "llama 8"), (4, "llama last-24"), (5, "deepseek_v3")],
)
def test_tokens_are_those_of_a_sequence_alone_whatever_the_schedule(llama: LoadedModel, seed: int, name: str) -> None:
    loaded = llama if name == "llama" else small(name, llama)
    schedule = Schedule(loaded, seed)
    schedule.run()
    engine, (batch,) = schedule.bench.engine, schedule.parts
    stats = engine.stats()
    assert engine.is_idle and (stats.rows, stats.waiting, stats.prefilling, stats.kv_bytes) == (0, 0, 0, 0)
    assert batch.holds_nothing
    for seq in schedule.specs:
        reason = schedule.bench.finish(seq).reason
        assert reason == "length" or (reason == "cancelled" and seq in schedule.cancelled)
    alone = Bench(loaded, max_rows=64, prefix_cache_bytes=0, prefill_rows=1, prefill_chunk=4096)
    equals: dict[bytes, list[int]] = {}  # by what decides its tokens
    for seq, each in schedule.specs.items():
        what = msgspec.json.encode((each.prompt_ids, each.sampling))
        if what not in equals:
            alone.submit(msgspec.structs.replace(each, group="", sequence_class="interactive"))
            alone.run()
            equals[what] = alone.tokens(seq)
        told = schedule.bench.tokens(seq)
        assert told == equals[what][: len(told)]
        assert seq in schedule.cancelled or len(told) == each.sampling.max_tokens
