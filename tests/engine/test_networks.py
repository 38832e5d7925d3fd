"""What a network computes is what numpy says, however many rows are together and wherever a row stopped.

On its own, and in an engine beside rows that decode.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from mlx_model.loader import LoadedModel
from mlx_model.networks import network
from mlx_model.networks.network import Network, Pieces, multiply, read_network
from shared.adapter_files.formats import prepare
from shared.errors import AdapterRejectedError
from shared.networks.tensors import Tensors, pack, unpack
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.adapter_bench import AdapterBench, row
from tests.engine.adapter_models import MadeAdapter, make_adapter
from tests.engine.conftest import prompt_of
from tests.unit.networks import ALL, LSTM, MLP, SERIES, computed, inputs_of, spec_of, weights_of
from worker.engine.batch import network_run
from worker.engine.messages import RowRequest


def network_of(described: dict[str, Any], seed: int = 0) -> Network:
    weights = {name: mx.array(each) for name, each in weights_of(described, seed).items()}
    return Network(spec_of(described), weights)


def finished(run: Pieces) -> tuple[Tensors, int]:
    """What it gives, and how often it has let others go first."""
    pauses = 0
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value, pauses
        pauses += 1


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("name", ALL)
def test_outputs_and_state_are_those_of_a_reference(name: str, rows: int) -> None:
    described = ALL[name]
    inputs = inputs_of(described, rows, steps=37)
    found, _ = finished(network_of(described).run(inputs))
    wanted = computed(described, weights_of(described), inputs)
    assert found.keys() == wanted.keys()
    for each, values in wanted.items():
        np.testing.assert_allclose(found[each], values, rtol=1e-5, atol=1e-5)


def test_a_state_goes_on_where_it_stopped() -> None:
    network = network_of(SERIES)
    inputs = inputs_of(SERIES, 3, steps=12)
    whole, _ = finished(network.run(inputs))
    state: Tensors = {}
    for begin, end in ((0, 5), (5, 6), (6, 12)):
        part, _ = finished(network.run({name: each[:, begin:end] for name, each in inputs.items()} | state))
        np.testing.assert_allclose(part["each"], whole["each"][:, begin:end], rtol=1e-5, atol=1e-5)
        state = {name: part[name] for name in network.spec.state}
    for name in network.spec.state:
        np.testing.assert_allclose(state[name], whole[name], rtol=1e-5, atol=1e-5)


def test_long_work_lets_others_go_first() -> None:
    _, short = finished(network_of(SERIES).run(inputs_of(SERIES, 1, steps=2)))
    _, long = finished(network_of(SERIES).run(inputs_of(SERIES, 1, steps=100)))
    assert long - short == 2 * (7 - 1), "16 steps of each recurrent layer at once"


def test_products_on_a_gpu_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    x, weight = (mx.array(draw.standard_normal(shape).astype(np.float32)) for shape in ((37, 20), (11, 20)))
    wanted = np.array(multiply(x, weight))
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
    for at_once in (1 << 24, 11 * 20 * 5, 1):
        monkeypatch.setattr(network, "MOST_AT_ONCE", at_once)
        np.testing.assert_allclose(np.array(multiply(x, weight)), wanted, rtol=1e-5, atol=1e-5)


def test_a_file_that_is_not_the_description_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file(weights_of(MLP), file)
    assert read_network("n@1", spec_of(MLP), file).nbytes == sum(each.nbytes for each in weights_of(MLP).values())
    with pytest.raises(AdapterRejectedError, match="n@1"):
        read_network("n@1", spec_of(LSTM), file)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_weights_may_be_half_as_wide(tmp_path: Path, dtype: mx.Dtype) -> None:
    halves = {name: mx.array(each).astype(dtype) for name, each in weights_of(SERIES).items()}
    mx.save_safetensors(str(tmp_path / "w.safetensors"), halves)
    config = json.dumps({"network": SERIES}).encode()
    adapter = prepare(config, tmp_path / "w.safetensors", tmp_path)
    assert adapter.network is not None
    inputs = inputs_of(SERIES, 2)
    found, _ = finished(read_network("n@1", adapter.network, adapter.path).run(inputs))
    wanted = computed(SERIES, {name: np.array(each.astype(mx.float32)) for name, each in halves.items()}, inputs)
    np.testing.assert_allclose(found["y"], wanted["y"], rtol=1e-5, atol=1e-5)


NETWORKS = {"net@1": (MLP, 0), "net@2": (MLP, 1), "long@1": (SERIES, 0), "memory@1": (LSTM, 0)}


@pytest.fixture(scope="module")
def versions(llama: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, MadeAdapter]:
    folder = tmp_path_factory.mktemp("networks")
    lora = make_adapter(llama.model, folder)
    made = {"a@1": lora}
    for id, (described, seed) in NETWORKS.items():
        name, _, number = id.partition("@")
        path = folder / f"{id}.safetensors"
        save_file(weights_of(described, seed), path)
        network = {"kind": "network", "rank": 0, "modules": (), "network": spec_of(described)}
        manifest = msgspec.structs.replace(
            lora.manifest, name=name, version=int(number), base_sha256="network", **network
        )
        made[id] = MadeAdapter(path, manifest, None)
    return made


@pytest.fixture
def bench(llama: LoadedModel, versions: dict[str, MadeAdapter]) -> Iterator[AdapterBench]:
    with AdapterBench(llama, versions) as made:
        made.provide()
        yield made


def asked(seq: str, adapter: str, inputs: Tensors, **fields: Any) -> SequenceSpec:
    sampling = SamplingParams(0, 0)
    return SequenceSpec(seq, "m", (), sampling, kind="network", adapter=adapter, tensors=pack(inputs), **fields)


def outputs(bench: AdapterBench, seq: str) -> Tensors:
    [event] = bench.events[seq]
    assert event.finish is not None and event.finish.reason == "stop", event.finish
    assert event.embedding is not None and event.tokens == []
    return unpack(event.embedding)


def assert_true(bench: AdapterBench, wanted: SequenceSpec) -> None:
    described, seed = NETWORKS[wanted.adapter]
    reference = computed(described, weights_of(described, seed), unpack(wanted.tensors))
    found = outputs(bench, wanted.id)
    assert found.keys() == reference.keys() and bench.events[wanted.id][0].version == wanted.adapter
    for name, values in reference.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-5)


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward."""
    rows: list[int] = []
    run = Network.run

    def counted(network: Network, inputs: Tensors) -> Pieces:
        rows.append(len(next(iter(inputs.values()))))
        return run(network, inputs)

    monkeypatch.setattr(Network, "run", counted)
    return rows


def test_sequences_of_a_version_share_a_forward(bench: AdapterBench, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = count_runs(monkeypatch)
    wanted = [asked(f"a{at}", "net@1", inputs_of(MLP, at + 1, seed=at)) for at in range(4)]
    wanted += [asked("b", "net@2", inputs_of(MLP, 2)), asked("c", "memory@1", inputs_of(LSTM, 2))]
    bench.submit(*wanted)
    bench.run()
    assert sorted(rows) == [2, 2, 1 + 2 + 3 + 4]
    for each in wanted:
        assert_true(bench, each)
    bench.assert_nothing_is_held()
    assert bench.engine.stats().rows == 0


def test_rows_decode_while_a_long_network_runs(bench: AdapterBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_run, "TURN_S", 0.0)  # one piece a turn
    decoding = row("s1", prompt_of(20), "a@1", max_tokens=30)
    bench.submit(decoding, row("load", [1, 2], "a@1", max_tokens=1))
    bench.until(lambda: len(bench.tokens("s1")) > 2)
    long = asked("long", "long@1", inputs_of(SERIES, 2, steps=150))
    bench.submit(long, asked("gone", "long@1", inputs_of(SERIES, 1, steps=150)))
    bench.until(lambda: len(bench.tokens("s1")) > 6)
    bench.engine.cancel("gone")
    bench.until(lambda: bool(bench.events.get("long")))
    assert len(bench.tokens("s1")) > 12, "20 pieces, and a decode step beside each"
    bench.run()
    bench.assert_true_to_its_versions(decoding)
    assert_true(bench, long)
    assert bench.finish("gone").reason == "cancelled"


def test_networks_of_many_versions_share_the_time_of_a_turn(
    bench: AdapterBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_run, "TURN_S", 0.0)
    pieces: list[str] = []
    work = network_run._Run.work
    monkeypatch.setattr(network_run._Run, "work", lambda run: (pieces.append("piece"), work(run))[1])
    wanted = [asked(id, id, inputs_of(described, 3)) for id, (described, _) in NETWORKS.items()]
    bench.submit(*wanted, *(asked(f"with {at}", "net@1", inputs_of(MLP, 1)) for at in range(3)))
    most = 0
    while len(bench.events) < len(wanted) + 3:
        before = len(pieces)
        bench.turn()
        most = max(most, len(pieces) - before)
    assert most == 1, "and all that is over is told in the same turn"
    for each in wanted:
        assert_true(bench, each)


def test_prompts_and_networks_do_not_wait_for_each_other(
    llama: LoadedModel, versions: dict[str, MadeAdapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    with AdapterBench(llama, versions, prefill_chunk=4) as bench:
        bench.provide()
        bench.submit(asked("load", "net@1", inputs_of(MLP, 1)))
        bench.run()
        ids = tuple(prompt_of(200))
        scored = SequenceSpec("scored", "m", ids[:100], SamplingParams(0, 0), kind="score", score_ids=ids[100:])
        bench.submit(scored)
        bench.turn()
        bench.submit(asked("short", "net@1", inputs_of(MLP, 1)))
        bench.until(lambda: "short" in bench.events)
        assert "scored" not in bench.events, "an action comes before the end of a long prompt"
        monkeypatch.setattr(network_run, "TURN_S", 0.0)
        bench.submit(asked("long", "long@1", inputs_of(SERIES, 1, steps=1000)))
        bench.until(lambda: "scored" in bench.events)
        assert "long" not in bench.events, "and the prompt is fed beside a long network"
        bench.run()
        assert bench.finish("scored").reason == bench.finish("long").reason == "stop"


def test_what_is_wrong_ends_its_own_sequence_alone(bench: AdapterBench, monkeypatch: pytest.MonkeyPatch) -> None:
    right = asked("right", "net@1", inputs_of(MLP, 2))
    huge = {"observation": np.full((1, 4), 3e38, np.float32)}
    text = SequenceSpec("text", "m", (1, 2), SamplingParams(2, 0), adapter="net@1")
    bench.submit(
        asked("other", "net@1", inputs_of(LSTM, 1) | {"x": np.zeros((1, 1), np.float32)}),
        asked("torn", "net@1", {}),
        right,
        asked("lora", "a@1", inputs_of(MLP, 1)),
        asked("base", "", inputs_of(MLP, 1)),
        text,
        asked(
            "huge", "long@1", {"series": np.full((1, 1, 5), 3e38, np.float32), "last": huge["observation"][:, None, :2]}
        ),
    )
    bench.run()
    assert_true(bench, right)
    said = {seq: bench.finish(seq).error_message for seq in ("other", "torn", "lora", "base", "text")}
    assert "reads no 'x'" in said["other"] and "missing" in said["torn"], said
    assert "a@1 is no network" in said["lora"] and "is no network" in said["base"], said
    assert "net@1 is a network" in said["text"], said

    def broken(network: Network, inputs: Tensors) -> Pieces:
        yield
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Network, "run", broken)
    together = [asked(f"t{at}", "net@1", inputs_of(MLP, 1)) for at in range(5)]
    bench.submit(*together, row("s1", prompt_of(5), "", max_tokens=3))
    bench.run()
    assert all(bench.finish(each.id).error_code == "engine_error" for each in together)
    assert bench.finish("s1").reason == "length", "the engine goes on"


def test_outputs_that_are_no_numbers_are_an_error_of_their_row(
    llama: LoadedModel, versions: dict[str, MadeAdapter], tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    save_file({name: np.full_like(each, 1e38) for name, each in weights_of(MLP).items()}, path)
    made = {**versions, "net@1": MadeAdapter(path, versions["net@1"].manifest, None)}
    with AdapterBench(llama, made) as bench:
        bench.provide()
        bench.submit(asked("huge", "net@1", {"observation": np.ones((1, 4), np.float32)}))
        bench.run()
        assert bench.finish("huge").error_code == "unsupported_model" and "'" in bench.finish("huge").error_message


def test_a_deadline_a_pause_and_a_new_attempt_hold_for_networks(bench: AdapterBench) -> None:
    late = asked("late", "net@1", inputs_of(MLP, 1), deadline_ms=1)
    frozen, again = asked("frozen", "net@1", inputs_of(MLP, 1)), asked("again", "net@1", inputs_of(MLP, 1))
    bench.engine.freeze(clear_cache=True)
    bench.submit(late, frozen, again)
    for _ in range(5):
        bench.turn()
    assert bench.finish("late").reason == "deadline" and "frozen" not in bench.events
    bench.engine.submit([RowRequest(again, 2)])
    bench.engine.thaw()
    bench.run()
    assert_true(bench, frozen)
    assert [event.attempt for event in bench.events["again"]] == [2]


def test_a_network_goes_with_its_slot(llama: LoadedModel, versions: dict[str, MadeAdapter]) -> None:
    held: dict[str, int] = {}
    with AdapterBench(llama, versions, slots=1) as bench:
        bench.provide()
        for at, version in enumerate(("net@1", "long@1", "net@2", "net@1", "long@1")):
            wanted = asked(f"v{at}", version, inputs_of(NETWORKS[version][0], 2))
            bench.submit(wanted)
            bench.run()
            assert_true(bench, wanted)
            assert held.setdefault(version, bench.slots.stats.bytes) == bench.slots.stats.bytes, "no others are held"
