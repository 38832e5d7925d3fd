"""A merged model says what its base says with the adapter beside it; what is refused leaves no trace."""

import json
import resource
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from shared.adapter_files.config import mlx_config
from shared.errors import AdapterRejectedError, SetupError
from shared.process.whole_folder import whole_folder
from tests.engine.adapter_bench import AdapterBench, row
from tests.engine.adapter_models import EVERYWHERE, LINEARS, MadeAdapter, make_adapter
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.small_models import LLAMA, QWEN3, write_model
from tests.engine.test_multi_lora import MOE, SWITCHES
from tests.unit.adapter_files import mlx_config as tuner_config
from tests.unit.adapter_files import peft_config, peft_tensors, write
from tests.unit.networks import MLP, weights_of
from trainer.merging import Merging, merge

PROMPTS = [prompt_of(9), prompt_of(23, 1)]
PACKED = ("weight", "scales", "biases")


def tensors_of(folder: Path, name: str = "model") -> dict[str, mx.array]:
    tensors = mx.load(str(folder / f"{name}.safetensors"))
    assert isinstance(tensors, dict)
    return tensors


def made_adapter(base: Path, folder: Path, **how: Any) -> tuple[LoadedModel, MadeAdapter, Path]:
    """A base in memory, a random adapter of it, and the adapter's folder."""
    loaded = load_model(EngineConfig(str(base)))
    made = make_adapter(loaded.model, folder, **how)
    made.path.rename(folder / "adapters.safetensors")
    made = replace(made, path=folder / "adapters.safetensors")
    said = made.manifest
    (folder / "adapter_config.json").write_bytes(mlx_config(said.kind, said.rank, said.scale, said.modules))
    return loaded, made, folder


def said_with(loaded: LoadedModel, made: MadeAdapter) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities of the base, served with the adapter."""
    with AdapterBench(loaded, {"a@1": made}) as bench:
        bench.provide("a@1")
        bench.submit(*(row(str(at), prompt, "a@1") for at, prompt in enumerate(PROMPTS)))
        bench.run()
        return [(bench.tokens(str(at)), bench.logprobs(str(at))) for at in range(len(PROMPTS))]


def said_by(folder: Path) -> list[tuple[list[int], list[float]]]:
    bench = Bench(load_model(EngineConfig(str(folder))))
    bench.submit(*(spec(str(at), prompt, max_tokens=12) for at, prompt in enumerate(PROMPTS)))
    bench.run()
    return [(bench.tokens(str(at)), bench.logprobs(str(at))) for at in range(len(PROMPTS))]


def assert_same(one: list[tuple[list[int], list[float]]], other: list[tuple[list[int], list[float]]]) -> None:
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(one, other, strict=True):
        assert tokens == other_tokens
        assert np.allclose(logprobs, other_logprobs, rtol=0, atol=1e-4)


CASES: dict[str, tuple[dict[str, Any], int | None, dict[str, Any]]] = {
    "llama": (LLAMA, None, {"keys": LINEARS}),
    "everywhere": (LLAMA, None, {"keys": EVERYWHERE, "rank": 5, "scale": 3.0}),
    "dora": (LLAMA, None, {"keys": EVERYWHERE, "dora": True}),
    "tied": (QWEN3, None, {"keys": (*LINEARS, "model.embed_tokens")}),
    "experts": (MOE, None, {"keys": SWITCHES, "rank": 4}),
    "dequantized": (LLAMA, 4, {"keys": EVERYWHERE}),
    "dequantized dora": (LLAMA, 4, {"keys": LINEARS, "dora": True}),
    "dequantized experts": (MOE, 4, {"keys": SWITCHES}),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_merged_model_says_what_the_base_says_with_the_adapter(case: str, tmp_path: Path) -> None:
    config, bits, how = CASES[case]
    base = write_model(tmp_path / "base", config, bits=bits)
    loaded, made, adapter = made_adapter(base, tmp_path / "adapter", **how)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    merge(Merging(str(base), adapter, tmp_path / "merged", "a@1", loaded.card.base_sha256, dequantize=bool(bits)))
    assert_same(said_with(loaded, made), said_by(tmp_path / "merged"))
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    files = {path.name for path in (tmp_path / "merged").iterdir()}
    assert files == {*before, "merged.json", "model.safetensors.index.json"}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == before[name]
    assert not list(tmp_path.glob("*partial*"))


@pytest.mark.parametrize(
    ("config", "keys"), [(LLAMA, ("self_attn.q_proj",)), (MOE, SWITCHES), (QWEN3, ("model.embed_tokens",))]
)
def test_a_packed_weight_is_packed_again_as_it_was_and_others_stay(
    tmp_path: Path, config: dict[str, Any], keys: tuple[str, ...]
) -> None:
    base = write_model(tmp_path / "base", config, bits=4)
    _, made, adapter = made_adapter(base, tmp_path / "adapter", keys=keys, strength=0.1)
    merge(Merging(str(base), adapter, tmp_path / "merged", "a@1"))
    ours, old, lora = tensors_of(tmp_path / "merged"), tensors_of(base), tensors_of(adapter, "adapters")
    changed = {name for name in old if not mx.array_equal(old[name], ours[name])}
    assert ours.keys() == old.keys()
    assert changed == {f"{module}.{part}" for module in made.manifest.modules for part in PACKED}
    for module in made.manifest.modules:
        a, b = lora[f"{module}.lora_a"], lora[f"{module}.lora_b"]
        delta = b @ a if a.ndim == 3 else a @ b if "embed" in module else (a @ b).T
        exact = unpacked(old[f"{module}.{part}"] for part in PACKED) + made.manifest.scale * delta
        again = unpacked(mx.quantize(exact, group_size=32, bits=4))
        assert mx.allclose(unpacked(ours[f"{module}.{part}"] for part in PACKED), again, atol=1e-5)
    said = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (said["quantization"]["bits"], said["quantization"]["group_size"]) == (4, 32)
    assert load_model(EngineConfig(str(tmp_path / "merged"))).card.quantization == "4 bits, groups of 32"


def unpacked(parts: Iterable[mx.array]) -> mx.array:
    return mx.dequantize(*parts, group_size=32, bits=4)


def test_mlx_lm_loads_what_was_merged_from_a_peft_folder_with_rank_stabilised_scale(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", LLAMA)
    _, made, _ = made_adapter(base, tmp_path / "adapter", keys=("self_attn.q_proj",), rank=4, scale=3.0)
    config = peft_config(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj"])  # 6 / sqrt(4)
    folder = write(tmp_path / "peft", config, peft_tensors(load_file(made.path)))
    merge(Merging(str(base), folder, tmp_path / "merged", "peft"))
    model, _ = mlx_lm.utils.load(str(tmp_path / "merged"))
    ids = mx.array(PROMPTS[:1])
    assert mx.allclose(model(ids), made.reference(ids), atol=1e-4)


def test_a_base_of_16_bits_stays_one_and_is_rounded_once(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", LLAMA)
    old = {name: value.astype(mx.bfloat16) for name, value in tensors_of(base).items()}
    mx.save_safetensors(str(base / "model.safetensors"), old)
    _, made, adapter = made_adapter(base, tmp_path / "adapter", keys=("mlp.up_proj",))
    merge(Merging(str(base), adapter, tmp_path / "merged", "a@1"))
    ours, tensors = tensors_of(tmp_path / "merged"), tensors_of(adapter, "adapters")
    module = "model.layers.1.mlp.up_proj"
    delta = made.manifest.scale * (tensors[f"{module}.lora_a"] @ tensors[f"{module}.lora_b"]).T
    exact = old[f"{module}.weight"].astype(mx.float32) + delta
    assert ours[f"{module}.weight"].dtype == mx.bfloat16
    assert (mx.abs(ours[f"{module}.weight"] - exact) <= mx.abs(exact) * 2**-8 + 1e-7).all().item()


def test_a_sum_that_the_bases_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", LLAMA)
    half = {name: value.astype(mx.float16) for name, value in tensors_of(base).items()}
    mx.save_safetensors(str(base / "model.safetensors"), half)
    _, made, adapter = made_adapter(base, tmp_path / "adapter", keys=("mlp.up_proj",))
    config = mlx_config("lora", made.manifest.rank, 1e6, made.manifest.modules)
    (adapter / "adapter_config.json").write_bytes(config)
    with pytest.raises(SetupError, match=r"up_proj.weight: what is merged is too large a number for mlx.core.float16"):
        merge(Merging(str(base), adapter, tmp_path / "merged", "a@1"))
    assert not list(tmp_path.glob("merged*"))


def test_heads_go_beside_the_merged_weights_as_an_adapter_of_their_own(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", LLAMA)
    _, made, adapter = made_adapter(base, tmp_path / "adapter", keys=("self_attn.q_proj",))
    tensors = load_file(made.path) | {"heads.reward.weight": np.ones((1, 64), np.float32)}
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"heads": {"reward": {"kind": "scalar"}}}
    both = write(tmp_path / "both", config, tensors)
    assert merge(Merging(str(base), both, tmp_path / "merged", "a@1")) == ("reward",)
    kept = load_file(tmp_path / "merged" / "heads" / "adapters.safetensors")
    assert list(kept) == ["heads.reward.weight"]
    load_model(EngineConfig(str(tmp_path / "merged")))
    alone = write(tmp_path / "alone", {"heads": config["heads"]}, kept)
    with pytest.raises(SetupError, match="heads alone"):
        merge(Merging(str(base), alone, tmp_path / "other", "a@1"))
    from_merged = tmp_path / "merged" / "heads"
    with pytest.raises(SetupError, match="heads alone"):
        merge(Merging(str(base), from_merged, tmp_path / "other", "a@1"))


def test_a_network_is_not_merged(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", LLAMA)
    network = write(tmp_path / "network", {"network": MLP}, weights_of(MLP))
    with pytest.raises(SetupError, match="pole@1 is a network"):
        merge(Merging(str(base), network, tmp_path / "merged", "pole@1"))
    assert not list(tmp_path.glob("merged*"))


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory, llama_folder: Path) -> tuple[Path, Path]:
    """A base, and a good adapter of it."""
    _, _, adapter = made_adapter(llama_folder, tmp_path_factory.mktemp("good") / "adapter")
    return llama_folder, adapter


def _wrong_shape(asked: Merging, folder: Path) -> Merging:
    tensors = load_file(asked.adapter / "adapters.safetensors")
    key = "model.layers.0.self_attn.q_proj.lora_a"
    config = json.loads((asked.adapter / "adapter_config.json").read_text())
    return replace(asked, adapter=write(folder / "wrong", config, tensors | {key: tensors[key][:-1].copy()}))


def _not_empty(asked: Merging, folder: Path) -> Merging:
    asked.target.mkdir()
    (asked.target / "thesis.txt").write_text("mine")
    return asked


def _quantised(asked: Merging, folder: Path) -> Merging:
    return replace(asked, dequantize=True)


def _classifier(asked: Merging, folder: Path) -> Merging:
    base = write_model(folder / "base", LLAMA | {"architectures": ["LlamaForSequenceClassification"]})
    return replace(asked, base=str(base))


def _no_such_module(asked: Merging, folder: Path) -> Merging:
    tensors = load_file(asked.adapter / "adapters.safetensors")
    wrong = {name.replace("q_proj", "x_proj"): tensor for name, tensor in tensors.items()}
    config = tuner_config(lora_parameters={"rank": 8, "scale": 2.0})
    return replace(asked, adapter=write(folder / "wrong", config, wrong))


def _network(asked: Merging, folder: Path) -> Merging:
    return replace(asked, adapter=write(folder / "network", {"network": MLP}, weights_of(MLP)))


WRONG: dict[str, tuple[Callable[[Merging, Path], Merging], str]] = {
    "shape": (_wrong_shape, r"q_proj: adapts 63 inputs and 64 outputs"),
    "module": (_no_such_module, r"x_proj: the base model has no such module"),
    "fingerprint": (lambda asked, _: replace(asked, base_sha256="f" * 64), "a base with the fingerprint ffffffffffff"),
    "no base": (lambda asked, folder: replace(asked, base=str(folder / "none")), "no model folder"),
    "no adapter": (lambda asked, folder: replace(asked, adapter=folder / "none"), "none holds no adapter_config.json"),
    "not empty": (_not_empty, "is not empty"),
    "in the base": (lambda asked, _: replace(asked, target=Path(asked.base) / "merged"), "lies in the base's folder"),
    "not quantised": (_quantised, "the base is not quantised"),
    "classifier": (_classifier, "classifier or reward model"),
    "network": (_network, "is a network and no adapter of a language model"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_merged_is_refused_and_leaves_nothing(
    wrong: str, bad: tuple[Path, Path], tmp_path: Path
) -> None:
    change, said = WRONG[wrong]
    base, adapter = bad
    asked = change(Merging(str(base), adapter, tmp_path / "merged", "a@1"), tmp_path)
    before = sorted(tmp_path.rglob("*")) + sorted(base.rglob("*"))
    with pytest.raises((SetupError, AdapterRejectedError), match=said):
        merge(asked)
    assert sorted(tmp_path.rglob("*")) + sorted(base.rglob("*")) == before


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No file grows beyond 128 KiB: the adapter's does not, the model's would."""
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # a cut one would stay
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_told_and_leaves_nothing(bad: tuple[Path, Path], tmp_path: Path, full_disk: None) -> None:
    base, adapter = bad
    with pytest.raises(SetupError, match=r"cannot write the merged model in .* GB are free there"):
        merge(Merging(str(base), adapter, tmp_path / "merged", "a@1"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_somebody_else_has_made_meanwhile_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="is not empty"), whole_folder(tmp_path / "there") as partial:
        (partial / "ours").write_text("ours")
        (tmp_path / "there").mkdir()
        (tmp_path / "there" / "theirs").write_text("theirs")
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "theirs"]


def test_dots_behind_a_link_are_those_of_the_folder_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    with whole_folder(tmp_path / "link" / ".." / "there"):
        pass
    assert [path.name for path in tmp_path.glob("**/there")] == ["there"]
    assert (tmp_path / "far" / "there").is_dir()


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "there"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    with whole_folder(tmp_path / "there") as partial:
        (partial / "ours").write_text("ours")
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "ours"]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with whole_folder(Path()) as partial:
        (partial / "ours").write_text("ours")
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["ours"]
