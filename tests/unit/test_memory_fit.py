"""Whether a model fits: sizes from headers, the room of a machine, the division of what is left, and refusals."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.errors import SetupError
from shared.fit.model_fit import Asked, Device, demand_of, fit_model
from shared.fit.needs import ModelFacts, Need, total
from shared.fit.plan import Demand, Room, plan, room_in
from shared.fit.reservations import Reservation, Reservations
from shared.fit.weights import TensorHeader, tensors_in
from shared.machine import linux
from shared.machine.memory import MachineMemory

GB = 10**9
LLAMA = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}


def write_model(folder: Path, config: dict[str, Any], **shapes: tuple[str, tuple[int, ...]]) -> Path:
    """A folder whose safetensors file has these tensors and, as files with holes do, no bytes on disk."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}
    header, at = {}, 0
    for name, (dtype, shape) in shapes.items():
        nbytes = sizes[dtype]
        for side in shape:
            nbytes *= side
        entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        header[name.replace("__", ".")], at = entry, at + nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return folder


def model_of(folder: Path, gigabytes: int, config: dict[str, Any] = LLAMA) -> Path:
    weights = {"model__layers__0__mlp__up_proj__weight": ("BF16", (gigabytes * 500_000, 1000))}
    return write_model(folder, config, **weights)


def test_sizes_are_read_from_headers_alone(tmp_path: Path) -> None:
    folder = model_of(tmp_path / "model", 40)
    (tensor,) = tensors_in(folder)
    assert tensor == TensorHeader("model.layers.0.mlp.up_proj.weight", "BF16", (20_000_000, 1000), 40 * GB)
    assert tensor.in_memory() == 40 * GB and tensor.in_memory(4) == 80 * GB


def test_a_cut_file_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = model_of(tmp_path / "model", 1)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(SetupError, match="download is incomplete"):
        tensors_in(folder)
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>")
    with pytest.raises(SetupError, match="no whole safetensors file"):
        tensors_in(folder)


def test_kv_of_a_token_counts_heads_layers_and_bits() -> None:
    facts = ModelFacts((), LLAMA, kv_number_bytes=2)
    assert facts.kv_bytes_per_token() == 2 * 30 * 3 * 64 * 2
    assert facts.kv_bytes_per_token(8, 64) == 2 * 30 * 3 * 64 * (1 + 4 / 64)
    hybrid = {**LLAMA, "layer_types": ["linear_attention"] * 20 + ["full_attention"] * 10}
    assert ModelFacts((), hybrid).kv_bytes_per_token() == 2 * 10 * 3 * 64 * 2
    seeing = {"text_config": LLAMA, "hidden_size": 1}
    assert ModelFacts((), seeing).kv_bytes_per_token() == facts.kv_bytes_per_token()
    assert ModelFacts((), {"model_type": "mamba"}).kv_bytes_per_token() == 0


def test_a_tower_counts_apart_and_ranks_divide_the_rest() -> None:
    tensors = (TensorHeader("model.layers.0.w", "BF16", (100,), 200), TensorHeader("vision_tower.w", "BF16", (10,), 20))
    assert ModelFacts(tensors, LLAMA).weights() == [Need("weights", 200), Need("vision tower", 20)]
    assert ModelFacts(tensors, LLAMA, ranks=2, sees=False).weights() == [Need("weights", 100)]


def test_packed_weights_stay_packed_and_their_linears_count_whole_for_adapters() -> None:
    config = {**LLAMA, "quantization": {"bits": 4, "group_size": 64}}
    columns = 72  # of words: 576 numbers of 4 bits
    packed = TensorHeader("model.layers.0.mlp.up_proj.weight", "U32", (1536, columns), 1536 * columns * 4)
    facts = ModelFacts((packed,), config, float_bytes=4)
    assert facts.weights() == [Need("weights", 1536 * 72 * 4)]
    assert facts.adapter_numbers(8) == 8 * (1536 + 576)


def test_on_linux_what_is_available_counts_less_what_others_will_still_take(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MachineMemory(total=100 * GB, available=60 * GB)
    other = Reservation(pid=1, purpose="", bytes=30 * GB)
    monkeypatch.setattr(Reservation, "held", property(lambda self: 20 * GB))
    room = room_in(memory, [other])
    assert (room.usable, room.others, room.other_processes) == (60 * GB - 10 * GB - 12 * GB, 10 * GB, 1)


def test_in_a_control_group_others_outside_it_take_what_is_outside_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Reservation, "held", property(lambda self: 0))
    memory = MachineMemory(total=100 * GB, available=60 * GB, limit=str(tmp_path), outside=50 * GB)
    monkeypatch.setattr(linux, "is_in_group", lambda pid, folder: (pid, folder) == (1, tmp_path))
    inside, outside, large = Reservation(1, "", 8 * GB), Reservation(2, "", 50 * GB), Reservation(2, "", 53 * GB)
    for others, taken, processes in (([outside], 0, 0), ([inside, outside], 8, 1), ([inside, large], 11, 2)):
        room = room_in(memory, others)
        assert (room.usable, room.others, room.other_processes) == ((48 - taken) * GB, taken * GB, processes)


def test_on_a_gpu_of_the_machine_its_working_set_counts_less_what_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MachineMemory(total=16 * GB, available=2 * GB)  # macOS moves other programs out of the way
    monkeypatch.setattr(Reservation, "held", property(lambda self: 3 * GB))
    others = [Reservation(1, "", 2 * GB), Reservation(2, "", 4 * GB)]
    assert room_in(memory, others, gpu_bytes=11 * GB).usable == (11 - 3 - 4) * GB
    assert room_in(memory, others, gpu_bytes=80 * GB, gpu_is_apart=True).usable == (80 - 2 - 4) * GB


def test_the_users_limit_counts_alone() -> None:
    memory = MachineMemory(total=16 * GB, available=1 * GB)
    room = room_in(memory, [Reservation(1, "", 2 * GB)], limit_bytes=9 * GB)
    assert (room.usable, room.limit) == (9 * GB, "--memory-limit")
    assert room_in(memory, [], limit_bytes=90 * GB).usable == 16 * GB


def test_kv_gets_half_of_what_is_left_and_other_workers_their_part() -> None:
    demand = Demand((Need("weights", 4 * GB),), kv_bytes_per_token=1000, prefix_bytes=1 * GB)
    alone, second = plan(demand, Room(12 * GB, 16 * GB)), plan(demand, Room(12 * GB, 16 * GB), processes=1)
    assert alone is not None and (alone.kv_bytes, alone.prefix_bytes) == (4 * GB, 1 * GB)
    assert second is not None and second.kv_bytes == 2 * GB
    assert alone.rows(1000, 2000) == 2000


def test_a_cache_of_prompts_takes_what_there_is_and_kv_what_was_asked_for() -> None:
    demand = Demand((Need("weights", 4 * GB),), kv_bytes_per_token=1000, kv_bytes=1 * GB, prefix_bytes=9 * GB)
    planned = plan(demand, Room(6 * GB, 16 * GB))
    assert planned is not None and (planned.kv_bytes, planned.prefix_bytes) == (1 * GB, GB // 4)
    assert plan(demand, Room(5 * GB - 1, 16 * GB)) is None


def test_what_does_not_fit_is_refused_with_numbers_and_what_would(tmp_path: Path) -> None:
    folder = model_of(tmp_path / "model", 16)
    asked = Asked("worker of big", limit_bytes=10 * GB)
    with pytest.raises(SetupError) as refused:
        fit_model(folder, LLAMA, asked, Device())
    said = str(refused.value)
    assert "needs 16." in said and "weights 16.0 GB" in said and "room for 10.0 GB of 10.0 GB" in said
    assert "quantised to 8 bits (weights of about 8.5 GB); the model quantised to 4 bits" in said
    assert "two machines" in said and "--kv-bits" not in said  # that alone would not help
    fitting = fit_model(folder, LLAMA, Asked("worker of big", limit_bytes=18 * GB), Device())
    assert fitting.firm_bytes > 16 * GB and fitting.kv_bytes > 0


def test_a_draft_model_counts_with_its_weights_and_its_kv(tmp_path: Path) -> None:
    folder, draft = model_of(tmp_path / "model", 4), model_of(tmp_path / "draft", 1)
    asked = Asked("worker of big", draft=draft, limit_bytes=9 * GB // 2)
    plain, drafting = (
        demand_of(ModelFacts(tensors_in(folder), LLAMA), asked, each)
        for each in (None, ModelFacts(tensors_in(draft), LLAMA))
    )
    assert drafting.kv_bytes_per_token == 2 * plain.kv_bytes_per_token > 0
    assert total(drafting.needs) - total(plain.needs) == total(ModelFacts(tensors_in(draft), LLAMA).weights())
    with pytest.raises(SetupError, match=r"draft model 1\.0 GB.*What would fit: no --draft-model-path"):
        fit_model(folder, LLAMA, asked, Device(), LLAMA)


def test_kv_that_was_asked_for_is_refused_with_the_most_that_fits(tmp_path: Path) -> None:
    folder = model_of(tmp_path / "model", 1)
    with pytest.raises(SetupError, match=r"KV 9\.0 GB as asked for.*What would fit: --kv-memory-gb 2\.73 at most"):
        fit_model(folder, LLAMA, Asked("worker", kv_bytes=9 * GB, limit_bytes=4 * GB), Device())


PROMISE = """
import sys
from pathlib import Path
from shared.fit.reservations import Reservation, Reservations
import os
store = Reservations(Path(sys.argv[1]))
store.reserve(lambda others: (None, Reservation(os.getpid(), "worker of x", 5 * 10**9)))
print("promised", flush=True)
sys.stdin.read()
"""


def test_what_a_process_has_promised_itself_counts_while_it_lives_and_not_when_it_is_killed(tmp_path: Path) -> None:
    store = Reservations(tmp_path / "memory")
    child = subprocess.Popen(
        [sys.executable, "-c", PROMISE, str(tmp_path / "memory")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline() == b"promised\n"
    (other,) = store.others()
    assert (other.pid, other.bytes, other.purpose) == (child.pid, 5 * 10**9, "worker of x")
    assert 0 < other.held < other.bytes and other.outstanding == other.bytes - other.held
    assert store.others("GPU 0") == []
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    assert store.others() == []


def test_a_refused_process_promises_nothing(tmp_path: Path) -> None:
    store = Reservations(tmp_path / "memory")

    def refuse(others: list[Reservation]) -> tuple[None, Reservation]:
        raise SetupError("no room")

    with pytest.raises(SetupError):
        store.reserve(refuse)
    assert not (tmp_path / "memory" / str(os.getpid())).exists()
    store.reserve(lambda others: (None, Reservation(os.getpid(), "", 1)))
    assert (tmp_path / "memory" / str(os.getpid())).exists()
    store.release()
    assert not (tmp_path / "memory" / str(os.getpid())).exists()
