"""Measurements of this machine that a later start reads."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from mlx_model.config import EngineConfig
from mlx_model.device import backend
from mlx_model.loader import LoadedModel
from mlx_model.tuned import FILE, ModelTuning, read_tuned, this_machine, tuning_of, write_tuned
from tests.e2e.rings import ROOT
from tests.waiting import HANG_S
from worker.engine.engine import Engine
from worker.engine.warm_up import SIZES, WarmUp, begun


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FILE, str(tmp_path / "tuned.json"))
    return tmp_path / "tuned.json"


def test_measurements_count_on_this_machine_and_with_this_mlx_alone(file: Path) -> None:
    assert read_tuned(file) is None
    write_tuned("a", ModelTuning("one", 128), file)
    write_tuned("b", ModelTuning("two", 256), file)
    assert (tuning_of("a"), tuning_of("b"), tuning_of("c")) == (ModelTuning("one", 128), ModelTuning("two", 256), None)
    for name in ("machine", "mlx", "backend"):
        of_another = msgspec.structs.replace(this_machine(), models={"a": ModelTuning("one", 128)}, **{name: "another"})
        file.write_bytes(msgspec.json.encode(of_another))
        assert tuning_of("a") is None
    file.write_text("{")
    assert tuning_of("a") is None
    write_tuned("a", ModelTuning("one", 64), file)
    assert tuning_of("a") == ModelTuning("one", 64)


def test_each_file_is_added_to_by_what_it_holds_itself(file: Path) -> None:
    other = file.with_name("other.json")
    write_tuned("a", ModelTuning("one", 128), file)
    write_tuned("b", ModelTuning("two", 256), other)
    write_tuned("c", ModelTuning("three", 512), other)
    kept = read_tuned(other)
    assert kept is not None and kept.models.keys() == {"b", "c"}


def test_the_fastest_of_the_ways_that_there_are_is_chosen() -> None:
    found = ModelTuning("one", 128, lora={"take": 3.0, "gather": 1.0, "fused": 2.0}, nucleus={"sorted": 1, "halved": 2})
    assert found.lora_way("take", "gather", "fused") == "gather"
    assert found.lora_way("take", "gather") is None, (
        "a kernel that was switched off since is not chosen, nor others unseen"
    )
    assert (found.halves, found.joins) == (False, None)


def test_an_engine_with_measurements_measures_nothing(llama: LoadedModel) -> None:
    asked = EngineConfig("", prefill_chunk=0)
    config = begun(asked, 64, ModelTuning("one", 128))
    engine = Engine(llama, config)
    assert engine.pieces.chunk.tokens == 128 and WarmUp(llama, config, engine, None).is_over
    assert begun(replace(asked, prefill_chunk=96), 64, ModelTuning("one", 128)).prefill_chunk == 96, "as it was asked"
    engine.close()


def test_a_model_is_measured_by_a_process_of_its_own(llama_folder: Path, file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "worker.tune", "--model", str(llama_folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    tuned = read_tuned(file)
    assert tuned is not None and told["file"] == str(file)
    (model,) = tuned.models.values()
    fewest, _ = SIZES[backend()].chunks
    assert fewest in model.pieces and model.chunk >= fewest and min(model.products.values()) > 0
    assert {"take", "gather"} <= model.lora.keys()
    assert model.kv == {}, "heads of 16 numbers are not packed"
    assert (model.joined.keys(), model.nucleus.keys()) == ({"apart", "joined"}, {"sorted", "halved"})
    assert model.padding == {}, "its linears are not quantised"
    assert str(llama_folder) not in file.read_text()
