"""An engine with adapter slots that a test turns by hand, and what its rows should have said."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_model.config import EngineConfig, SlotConfig
from mlx_model.loader import LoadedModel
from shared.frames import TokenEvent, spans_of
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.adapter_models import MadeAdapter, make_adapter, twin
from tests.engine.conftest import Bench
from tests.waiting import HANG_S
from worker.engine.adapter_slots import AdapterSlots
from worker.engine.engine import Engine


class AdapterBench(Bench):
    """Adapters a@1 .. and b@1 .. on a twin of the model, so that the model itself stays plain."""

    def __init__(self, loaded: LoadedModel, made: dict[str, MadeAdapter], *, slots: int = 4, **config: Any) -> None:
        defaults = EngineConfig("unused", max_rows=8, prefill_rows=4, prefill_chunk=64)
        self.loaded = replace(loaded, model=twin(loaded.model))
        self.made = made
        self.woken = threading.Event()
        self.slots = AdapterSlots(self.loaded, SlotConfig(slots=slots), self.woken.set)
        self.engine = Engine(self.loaded, replace(defaults, **config), self.slots)
        self.events: dict[str, list[TokenEvent]] = {}
        self.base = loaded.model

    def __enter__(self) -> "AdapterBench":
        return self

    def __exit__(self, *error: object) -> None:
        self.slots.close()

    def provide(self, *versions: str) -> None:
        for version in versions or self.made:
            self.slots.provide(self.made[version].path, self.made[version].manifest)

    def publish(self, version: str) -> None:
        """Provide a version and make it the latest."""
        self.provide(version)
        name, _, number = version.partition("@")
        self.slots.point(name, int(number))

    def publish_and_read(self, version: str) -> None:
        """Publish, and let the reader finish before any other turn: rows must not end while it reads.

        The reader wakes for every version that it has read, and may have one before this.
        """
        self.publish(version)
        while version not in [manifest.id for manifest, _ in self.slots._read.copy()]:
            assert self.woken.wait(HANG_S)
            self.woken.clear()

    def run_amid_a_hot_load(self, rows: Sequence[SequenceSpec]) -> None:
        """Run rows of `a` and `b@1`; when the one that is called s1 has some tokens, `a@2` comes. All are true."""
        self.publish("a@1")
        self.provide("b@1")
        self.submit(*rows)
        self.until(lambda: len(self.tokens("s1")) > 6)
        self.publish_and_read("a@2")
        self.run()
        for each in rows:
            self.assert_true_to_its_versions(each)

    def turn(self) -> list[TokenEvent]:
        if not self.engine.busy:
            self.woken.wait(0.05)
        self.woken.clear()
        return super().turn()

    def run(self, turns: int = 3000) -> None:
        """Turn until all rows have ended."""
        self.until(lambda: not self.engine.has_rows and not self.engine.busy, turns)

    def load(self, *versions: str) -> None:
        """Turn until these versions are in slots."""
        self.until(lambda: all(version in self.slots.stats.loaded for version in versions))

    def versions(self, seq: str) -> list[str]:
        """The version of every token."""
        return [event.version for event in self.events.get(seq, []) for _ in event.tokens]

    def assert_true_to_its_versions(self, spec: SequenceSpec) -> None:
        """Every token is what mlx-lm's own layers say under the version that it carries."""
        versions, tokens = self.versions(spec.id), self.tokens(spec.id)
        assert tokens == self._likeliest(spec, tokens, versions), (spec, versions)
        spans = spans_of(self.events.get(spec.id, []))
        assert [position for span in spans for position in range(span.start, span.end)] == list(range(len(versions)))

    def _likeliest(self, spec: SequenceSpec, tokens: list[int], versions: list[str]) -> list[int]:
        """The likeliest token where each of these stands; the KV of a switch stays, or is computed again."""
        likeliest: list[int] = []
        cache: Any = None
        for version, run in groupby(versions):
            model = self.made[version].reference if version else self.base
            begin, end = len(likeliest), len(likeliest) + len(list(run))
            fed = tokens[begin - 1 : end - 1]
            if cache is None or spec.kv_on_swap == "recompute":
                cache, fed = make_prompt_cache(model), [*spec.prompt_ids, *tokens[: end - 1]]
            logits_LV = model(mx.array(fed)[None], cache=cache)[0, begin - end :]
            likeliest += mx.argmax(logits_LV, axis=-1).tolist()  # type: ignore[arg-type]
        return likeliest

    def expected(self, prompt: tuple[int, ...], version: str, count: int) -> list[int]:
        """Greedy tokens of a run alone."""
        tokens: list[int] = []
        model = self.made[version].reference if version else self.base
        cache = make_prompt_cache(model)
        while len(tokens) < count:
            logits = model(mx.array(tokens[-1:] or prompt)[None], cache=cache)
            tokens.append(int(mx.argmax(logits[0, -1]).item()))
        return tokens

    def assert_nothing_is_held(self) -> None:
        assert self.slots._claims == {}
        assert all(holds == 0 for holds in self.slots._table.loaded().values())


def make_versions(loaded: LoadedModel, folder: Path) -> dict[str, MadeAdapter]:
    """Two adapters of three versions: LoRA of several ranks, and one DoRA."""
    shapes: list[tuple[str, int, dict[str, Any]]] = [
        ("a", 1, {}),
        ("a", 2, {"rank": 16}),
        ("a", 3, {"keys": ("self_attn.q_proj", "self_attn.v_proj")}),
        ("b", 1, {"rank": 4}),
        ("b", 2, {"dora": True}),
        ("b", 3, {"rank": 3, "scale": 10.0}),
    ]
    made = [make_adapter(loaded.model, folder, name=name, version=number, **how) for name, number, how in shapes]
    return {each.manifest.id: each for each in made}


def row(seq: str, prompt: list[int], adapter: str = "", **fields: Any) -> SequenceSpec:
    """A greedy sequence on an adapter; it follows if asked to."""
    tokens = fields.pop("max_tokens", 12)
    sampling = SamplingParams(tokens, 0, temperature=0.0, ignore_eos=True)
    return SequenceSpec(seq, "m", tuple(prompt), sampling, adapter=adapter, **fields)
