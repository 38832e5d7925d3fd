"""With `--batch-invariant` a row's tokens and log-probabilities are the same bit by bit, whatever else is computed."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from mlx_model.config import DiskConfig, EngineConfig, check_settings
from mlx_model.kv import layout, places
from mlx_model.kv.apart import PLACES
from mlx_model.kv.layout import layout_of
from mlx_model.loader import LoadedModel, describe_model, load_model
from shared.errors import SetupError
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.adapter_bench import AdapterBench, row
from tests.engine.adapter_models import ATTENTION, LINEARS, MadeAdapter, make_adapter
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec
from tests.engine.kv_models import GROUP, RECURRENT, WINDOWED, Model
from worker import invariance

KINDS = ["llama", "deepseek_v3", *WINDOWED, "llama last-24", "llama 4", "deepseek_v3 8"]
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 5, "max_tokens": 12, "top_logprobs": 2}
Bits = list[tuple[int, float, Any]]


def invariant(loaded: LoadedModel, name: str = "") -> LoadedModel:
    """The model with rows that lie apart; its name says how its KV is kept."""
    _, _, how = name.partition(" ")
    bits, bound = (0, int(how.removeprefix("last-"))) if how.startswith("last-") else (int(how or 0), 0)
    return replace(loaded, kv=layout_of(loaded.model, bits, GROUP, bound, invariant=True))


def bits(bench: Bench, seq: str, start: int = 0) -> Bits:
    """What was drawn from a position on, and all that is reported of it."""
    events = [event for event in bench.events[seq] if event.tokens]
    flat = [
        (token, logprob, top)
        for event in events
        for token, logprob, top in zip(event.tokens, event.logprobs, event.top_logprobs or (), strict=True)
    ]
    return flat[start - events[0].position :] if start else flat


def bench_of(loaded: LoadedModel, **config: object) -> Bench:
    return Bench(loaded, **{"block_size": 16, "max_rows": 20} | config)


def alone(loaded: LoadedModel, each: SequenceSpec) -> Bench:
    bench = bench_of(loaded)
    bench.submit(each)
    bench.run()
    return bench


@pytest.mark.parametrize("name", KINDS)
def test_a_row_has_the_same_bits_alone_and_in_any_company(name: str, model_of: Model) -> None:
    loaded = invariant(model_of(name), name)
    own = spec("own", prompt_of(45, seed=3), **DRAWN)
    first = alone(loaded, own)
    expected = bits(first, "own")
    assert len(expected) == 12
    # the same prompt again: all of it but the last id comes from the cache
    first.submit(msgspec.structs.replace(own, id="again"))
    first.run()
    assert first.finish("again").cached_tokens >= 32 or name == "llama last-24"
    assert bits(first, "again") == expected
    # others come before it and after it, and leave while it decodes; its prompt is fed in other pieces
    schedule = random.Random(name)
    for count in (1, 7, 15) if name == "llama" else (15,):
        bench = bench_of(loaded, prefill_chunk=schedule.choice([5, 16, 40]), prefill_rows=schedule.choice([1, 8]))
        others = [
            spec(
                f"o{at}",
                prompt_of(schedule.randint(1, 40), seed=at),
                seed=at,
                temperature=at % 2,
                max_tokens=1 + at % 9,
            )
            for at in range(count)
        ]
        bench.submit(*others[::2])
        bench.turn()
        bench.submit(own, *others[1::2])
        bench.run()
        assert bits(bench, "own") == expected, count
    # another engine goes on after some tokens, by its ids or with the KV that this one has left
    for events in (1, 7) if name == "llama" else (7,):
        second = bench_of(loaded)
        second.submit(spec("beside", prompt_of(9), max_tokens=9))
        second.submit(own, prior=tuple(first.events["own"][:events]), attempt=2)
        second.run()
        position = second.events["own"][0].position
        assert position and bits(second, "own") == expected[position:]


def test_kv_from_disk_changes_no_bit(model_of: Model, tmp_path: Path) -> None:
    loaded, disk = invariant(model_of("gpt_oss")), DiskConfig(str(tmp_path), write_through=True, async_writes=False)
    own, writer = spec("own", prompt_of(90, seed=3), **DRAWN), bench_of(loaded, disk=disk)
    writer.submit(spec("other", list(own.prompt_ids[:80])))
    writer.run()
    writer.engine.close(keep=True)
    reader = bench_of(loaded, disk=disk)
    reader.submit(spec("beside", prompt_of(9)), own)
    reader.run()
    assert reader.finish("own").cached_tokens == 64
    assert bits(reader, "own") == bits(alone(loaded, own), "own")


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss"])
def test_scores_are_the_samplers_log_probabilities(name: str, model_of: Model) -> None:
    loaded = invariant(model_of(name), name)
    own = spec("own", prompt_of(45, seed=3), temperature=1.0, seed=5, max_tokens=20)
    bench = alone(loaded, own)
    bench.submit(
        SequenceSpec(
            "s", "m", own.prompt_ids, SamplingParams(0, 0), kind="score", score_ids=tuple(bench.tokens("own"))
        ),
        spec("beside", prompt_of(30), max_tokens=9),
    )
    bench.run()
    assert bench.events["s"][-1].score_logprobs == bench.logprobs("own")


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_states_are_refused_by_name(name: str, model_of: Model) -> None:
    with pytest.raises(SetupError, match="ArraysCache, which depend on how a prompt is cut"):
        invariant(model_of(name))


def test_a_machine_whose_products_depend_on_a_rows_place_is_refused(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, sequences = invariant(llama), invariance.specs(llama.card.vocab_size, 4)
    assert invariance.different(loaded, sequences) == []
    forward = places.forward

    def skewed(*arguments: object, **options: object) -> mx.array:
        out = forward(*arguments, **options)  # type: ignore[arg-type]
        return out * (1 + 1e-6 * mx.arange(len(out)).reshape(-1, *[1] * (out.ndim - 1)))

    monkeypatch.setattr(places, "forward", skewed)
    assert invariance.different(loaded, sequences) != []
    with pytest.raises(SetupError, match="this machine cannot keep it for this model: a row's bits depend on"):
        invariant(llama)


@pytest.mark.parametrize("name", ["llama", "llama 4"])
def test_numbers_that_are_off_are_no_rounding(name: str, model_of: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = layout._fed_apart

    def off(model: Any, kv: layout.KvLayout) -> mx.array:
        logits = fed(model, kv)
        return logits + 0.05 * mx.max(mx.abs(logits))

    monkeypatch.setattr(layout, "_fed_apart", off)
    with pytest.raises(SetupError, match="its numbers differ"):
        invariant(model_of(name), name)


def test_every_forward_has_the_same_shape(llama: LoadedModel) -> None:
    bench = bench_of(invariant(llama))
    fed = SpiedModel.inside(bench).fed
    bench.submit(*(spec(f"s{at}", prompt_of(3 + 20 * at), max_tokens=3 + at) for at in range(4)))
    bench.run()
    assert set(fed) == {PLACES}


def test_what_cannot_be_kept_is_refused(llama: LoadedModel) -> None:
    bench = bench_of(invariant(llama))
    bench.submit(spec("s", [1, 2], return_routed_experts=True))
    bench.run()
    assert "--batch-invariant reports no experts" in str(bench.finish("s").failure)


def test_a_card_names_the_flag_before_and_after_loading(llama_folder: Path) -> None:
    config = EngineConfig(str(llama_folder), max_kv_size=64, batch_invariant=True)
    name = load_model(config).card.kv
    assert describe_model(config).card.kv == name and name == "the last 64 positions, batch-invariant"
    with pytest.raises(SetupError, match="leave it or the ranks out"):
        check_settings(config)


def test_other_adapters_change_no_bit(llama: LoadedModel, tmp_path: Path) -> None:
    made: dict[str, MadeAdapter] = {}
    for name, rank, keys in (("a", 8, ATTENTION), ("b", 32, LINEARS), ("c", 4, LINEARS)):
        each = make_adapter(llama.model, tmp_path, name=name, rank=rank, keys=keys, dora=name == "c")
        made[each.manifest.id] = each
    loaded = invariant(llama)

    def logprobs(*others: str) -> list[list[float]]:
        with AdapterBench(loaded, made) as bench:
            bench.provide()
            bench.submit(*(row(f"o{at}", prompt_of(20 + at), adapter) for at, adapter in enumerate(others)))
            bench.submit(row("own", prompt_of(30), "a@1"), row("base", prompt_of(33)))
            bench.run()
            return [bench.logprobs("own"), bench.logprobs("base")]

    assert logprobs() == logprobs("b@1", "c@1", "") == logprobs("c@1", "b@1", "b@1")
