"""A decode step of few operations says what mlx-lm's forward says: on a CPU bit by bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import BatchKVCache
from mlx_lm.tuner.lora import LoRALinear
from msgspec import structs

from mlx_model import device, tuned
from mlx_model.config import EngineConfig, SpeculationConfig
from mlx_model.loader import load_model
from mlx_model.lora import deltas, stacks
from mlx_model.lora.reader import read_adapter
from mlx_model.sites import quantized_product
from mlx_model.step import layer, product
from mlx_model.step.cuda import products
from mlx_model.step.cuda.rotary import Rotary
from mlx_model.step.decode_step import DecodeStep, decode_step_of, join_products
from tests.engine.adapter_bench import AdapterBench, row
from tests.engine.adapter_models import LINEARS, make_adapter
from tests.engine.conftest import prompt_of
from tests.engine.kv_models import CONFIGS
from tests.engine.small_models import LLAMA, QWEN3, write_model
from worker.engine.batch import row_model

BIASES = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
SCALED = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
MODELS: dict[str, tuple[dict[str, Any], int | None]] = {
    "llama": (LLAMA | BIASES | SCALED, None),
    "mistral3": ({"model_type": "mistral3", "text_config": LLAMA}, None),
    "qwen2": (LLAMA | {"model_type": "qwen2"}, None),
    "qwen3": (QWEN3, None),
    "qwen3 in 4 bits": (QWEN3 | {"tie_word_embeddings": False}, 4),
}


def load(folder: Path, config: dict[str, Any], bits: int | None = None) -> Any:
    return mlx_lm.utils.load_model(write_model(folder / "model", config, bits=bits))[0]


def prompted(model: Any) -> list[BatchKVCache]:
    """Caches of three rows behind their prompts."""
    caches = [BatchKVCache([0, 2, 1]) for _ in model.layers]
    model(mx.array([[5, 6, 7], [1, 2, 9], [3, 4, 8]]), cache=caches)
    return caches


def in_both_ways(model: Any, ask: Callable[[Any, Any], list[mx.array]]) -> list[list[mx.array]]:
    """What a decode step says with products apart, and compiled with those of one input joined."""
    apart = ask(model, DecodeStep(model, compiles=False))
    join_products(model)
    joined = DecodeStep(model, compiles=True)
    assert len(joined._layers[0].inputs) == 1, "products of the same input are one"
    return [apart, ask(model, joined)]


def decoded(model: Any, step: Any, tokens: int = 4) -> list[mx.array]:
    """Logits of some steps behind prompts of several lengths; `step` is called as the model is."""
    caches, told = prompted(model), []
    for at in range(tokens):
        told.append(step(mx.array([[at], [at + 7], [3 * at]]), caches))
    mx.eval(told)
    return told


def checked(model: Any, step: Any) -> list[mx.array]:
    """Logits of three tokens a row, and of one behind them."""
    caches = prompted(model)
    told = [step(mx.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), caches), step(mx.array([[4], [1], [5]]), caches)]
    mx.eval(told)
    return told


def is_same(one: mx.array, other: mx.array) -> bool:
    on_cpu = device.on_cpu()  # elsewhere products of another width add up in another order
    return bool(mx.array_equal(one, other) if on_cpu else mx.allclose(one, other, rtol=1e-2, atol=1e-2))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_mlx_lm(name: str, tmp_path: Path) -> None:
    model = load(tmp_path, *MODELS[name])
    wanted = decoded(model, lambda tokens, caches: model(tokens, cache=caches))
    for which in in_both_ways(model, decoded):
        for one, other in zip(wanted, which, strict=True):
            assert is_same(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_checked_as_mlx_lm_would(name: str, tmp_path: Path) -> None:
    model = load(tmp_path, *MODELS[name])
    wanted = checked(model, lambda tokens, caches: model(tokens, cache=caches))
    for which in in_both_ways(model, checked):
        for one, other in zip(wanted, which, strict=True):
            assert one.shape == other.shape
            assert is_same(one, other) or mx.allclose(one, other, rtol=1e-4, atol=1e-4), "but for the last bits"


@pytest.mark.parametrize("name", ["llama", "qwen3"])  # with biases and without
def test_products_by_a_kernel_are_where_products_were(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kernel computes on CUDA is computed here by MLX's operations: which weights it is given."""
    asked: list[str] = []

    def product(x: mx.array, weight: mx.array) -> mx.array:
        asked.append("product")
        return x @ weight.T

    def gated(x: mx.array, weight: mx.array) -> mx.array:
        asked.append("gated")
        return swiglu(*mx.split(x @ weight.T, 2, axis=-1))

    def parts(x: mx.array, weight: mx.array) -> mx.array:
        asked.append("parts")
        return x @ weight.T

    def added_and_normed(made: mx.array, fed: mx.array, norm: mx.array, eps: float) -> tuple[mx.array, mx.array]:
        asked.append("added")
        added = fed + made
        return added, mx.fast.rms_norm(added, norm, eps)

    model = load(tmp_path, MODELS[name][0] | {"tie_word_embeddings": False})
    model.set_dtype(mx.bfloat16)
    wanted = decoded(model, lambda tokens, caches: model(tokens, cache=caches))
    join_products(model)
    monkeypatch.setattr(products, "are_there", lambda: True)
    monkeypatch.setattr(products, "are_many_there", lambda _: False)
    monkeypatch.setattr(products, "product", product)
    monkeypatch.setattr(products, "gated", gated)
    monkeypatch.setattr(products, "parts", parts)
    monkeypatch.setattr(products, "added_and_normed", added_and_normed)
    monkeypatch.setattr(Rotary, "takes", lambda *_: False)
    told = decoded(model, DecodeStep(model, compiles=False), tokens=1)
    of_biases = ["product", "product", "added", "product", "product", "added"]
    a_layer = of_biases if name == "llama" else ["product", "parts", "added", "gated", "parts", "added"]
    assert asked == [*a_layer * len(model.layers), "product"], "all of a layer's, and the head's"
    assert mx.allclose(told[0], wanted[0], rtol=1e-2, atol=5e-2), "biases round by themselves"


def test_a_model_computes_the_same_by_what_was_measured_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(x: mx.array, *how: Any) -> mx.array:
        asked.append(x.shape[0])
        return quantized_product(x, *how)

    monkeypatch.setattr(product, "quantized_product", noted)
    monkeypatch.setenv(tuned.FILE, str(tmp_path / "tuned.json"))
    asks = EngineConfig(str(write_model(tmp_path / "model", MODELS["qwen3 in 4 bits"][0], bits=4)))
    plain = load_model(asks)
    measured = tuned.ModelTuning("m", 64, padding={3: 8}, joined={"apart": 2.0, "joined": 1.0})
    tuned.write_tuned(plain.card.base_sha256, measured, tmp_path / "tuned.json")
    fast = load_model(asks)
    wanted, told = (decoded(each.model, decode_step_of(each.model, each.tuning)) for each in (plain, fast))
    assert all(is_same(*pair) for pair in zip(wanted, told, strict=True))
    assert len(asked) // 4 == 7 * 2 + 1 + 4 * 2 + 1 and set(asked) == {3, 8}, "two layers of seven, then of four"


def test_layers_of_different_kinds_are_compiled_by_themselves(tmp_path: Path) -> None:
    """As in files of mixed quantisation."""
    model = load(tmp_path, QWEN3 | {"num_hidden_layers": 3})
    model.layers[1].mlp.down_proj = model.layers[1].mlp.down_proj.to_quantized(32, 8)
    wanted = decoded(model, lambda tokens, caches: model(tokens, cache=caches))
    for one, other in zip(wanted, decoded(model, DecodeStep(model, compiles=True)), strict=True):
        assert is_same(one, other)


def test_other_models_keep_their_forward(tmp_path: Path) -> None:
    gemma = LLAMA | CONFIGS["gemma3_text"] | {"model_type": "gemma3_text"}
    assert decode_step_of(load(tmp_path / "gemma", gemma)) is None
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
    assert decode_step_of(load(tmp_path / "windows", LLAMA | windows)) is None
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert decode_step_of(load(tmp_path / "dynamic", LLAMA | dynamic)) is None
    model = load(tmp_path / "wrapped", LLAMA)
    assert decode_step_of(model) is not None
    model.layers[1].mlp.up_proj = LoRALinear.from_base(model.layers[1].mlp.up_proj)
    assert decode_step_of(model) is None, "what it would compute is not known"


@pytest.mark.parametrize(("config", "dora"), [(QWEN3, False), (LLAMA | BIASES, True)])
def test_rows_with_adapters_and_of_the_base(
    config: dict[str, Any], dora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one batch and apart; adapters change some linears of a layer, or all. As with mlx-lm's forward."""
    write_model(tmp_path / "model", config)
    keys = {"few": ("self_attn.q_proj", "self_attn.v_proj"), "all": LINEARS}
    told = {}
    for step in (lambda *of: None, lambda model, _: DecodeStep(model, compiles=True)):
        monkeypatch.setattr(row_model, "decode_step_of", step)
        for name in keys:
            loaded = load_model(EngineConfig(str(tmp_path / "model"), kv_limit_bytes=1 << 28))
            made = make_adapter(loaded.model, tmp_path / f"{name}{len(told)}", keys=keys[name], dora=dora)
            with AdapterBench(loaded, {made.manifest.id: made}) as bench:
                bench.publish(made.manifest.id)
                rows = [
                    row(f"s{at}", prompt_of(9, at), each, max_tokens=8) for at, each in enumerate(("", "a@1", "a@1"))
                ]
                for each in (rows[:1], [structs.replace(each, id=f"{each.id}+") for each in rows]):
                    bench.submit(*each)
                    bench.run()
                told[name, len(told)] = {seq: (bench.tokens(seq), bench.logprobs(seq)) for seq in bench.events}
    few, everything, ours_few, ours = told.values()
    last_bits = 0.0 if device.on_cpu() else 1e-4
    for theirs, each in ((few, ours_few), (everything, ours)):
        for seq, (tokens, logprobs) in theirs.items():
            assert each[seq] == (tokens, pytest.approx(logprobs, rel=0, abs=last_bits))
    assert few != everything
    assert few["s0"][0] == few["s0+"][0], "the base says the same beside adapters"


def test_each_step_has_what_adapters_change_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters come one after another, each with something new: linears, a rank, gains at some linears, at others."""
    write_model(tmp_path / "model", LLAMA)
    few = ("self_attn.q_proj", "mlp.gate_proj")
    kinds: dict[str, dict[str, Any]] = {
        "few": {"keys": few},
        "more": {},
        "rank": {"rank": 32},
        "gains": {"keys": few, "dora": True},
        "rest": {"dora": True},
    }
    told = []
    for step in (lambda *of: None, lambda model, _: DecodeStep(model, compiles=False)):
        monkeypatch.setattr(row_model, "decode_step_of", step)
        loaded = load_model(EngineConfig(str(tmp_path / "model"), kv_limit_bytes=1 << 28))
        made = {
            f"{name}@1": make_adapter(loaded.model, tmp_path / f"{name}{len(told)}", name=name, **kind)
            for name, kind in kinds.items()
        }
        with AdapterBench(loaded, made, slots=len(made)) as bench:
            for number, name in enumerate(kinds):
                bench.publish(f"{name}@1")
                bench.submit(
                    *(row(f"{number} {each}", prompt_of(6, 1), f"{each}@1") for each in [*kinds][: number + 1])
                )
                bench.run()
            told.append({seq: (bench.tokens(seq), bench.logprobs(seq)) for seq in bench.events})
    for seq, (tokens, logprobs) in told[0].items():
        assert told[1][seq] == (tokens, pytest.approx(logprobs, rel=0, abs=1e-5))
    assert len({tuple(tokens) for tokens, _ in told[0].values()}) >= len(kinds)


def one_pass(x: mx.array, a: mx.array, bs: Any, ys: Any, slots: mx.array) -> list[mx.array]:
    """By MLX's operations."""
    added = deltas.deltas_of(x.reshape(slots.size, 1, -1), a, bs, slots, "gather")
    return [y + each.reshape(y.shape) for y, each in zip(ys, added, strict=True)]


def test_all_tokens_of_a_row_have_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "one_pass", one_pass)
    a, b, x, y = (mx.random.normal(shape) for shape in ((3, 16, 8), (3, 8, 24), (2, 3, 16), (2, 3, 24)))
    fused = deltas.Deltas("fused", mx.float32, True, (None,), (False,), (False,))
    slots = mx.array([2, 1], mx.uint32)
    (made,) = fused.parts((a, (b,), (), ()), slots, x, [y])
    assert mx.allclose(made, y + deltas.deltas_of(x, a, [b], slots, "gather")[0], atol=1e-5)


@pytest.mark.parametrize("ends", ["no", "of products", "of parts", "parts refused", "taken apart"])
@pytest.mark.parametrize("config", [QWEN3, LLAMA | BIASES])
def test_deltas_by_a_kernel_are_where_deltas_were(
    config: dict[str, Any], ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kernel adds on CUDA is added here by MLX's operations: to which columns, with which weights.

    `ends`: a kernel also does what follows in the layer, of products or of their parts; or none takes
    parts; or none takes joined products.
    """
    may = ends in ("of products", "of parts")
    asked: list[tuple[int, ...]] = []
    ended, epsilons = set[str](), set[float]()

    def halves(how: product.Product, arrays: product.Arrays, x: mx.array) -> mx.array:
        y = how.partial(arrays, x)
        return mx.stack([y / 2, y / 2]) if ends in ("of parts", "parts refused", "taken apart") else y

    def whole(made: mx.array, dtype: mx.Dtype = mx.float32) -> mx.array:
        return made if made.ndim == 2 else made.sum(axis=0)

    def gated(x: mx.array, a: mx.array, bs: Any, y: mx.array, slots: mx.array) -> mx.array:
        ended.add("gated")
        gate, up = one_pass(x, a, bs, mx.split(whole(y), 2, axis=-1), slots)
        return swiglu(gate, up)

    def normed(
        x: mx.array, a: mx.array, b: Any, y: mx.array, slots: mx.array, fed: mx.array, norm: mx.array, eps: float
    ) -> tuple[mx.array, mx.array]:
        ended.add(f"normed, {x.shape[-1]} inputs")
        epsilons.add(eps)
        added = fed + one_pass(x, a, [b], [whole(y)], slots)[0]
        return added, mx.fast.rms_norm(added, norm, eps)

    def joined(x: mx.array, a: mx.array, bs: Any, y: mx.array, slots: mx.array, widths: Any, places: Any) -> mx.array:
        asked.append(places)
        assert may or y.ndim == 2
        ends = [sum(widths[: at + 1]) for at in range(len(widths))]
        ys = mx.split(whole(y), ends[:-1], axis=-1)
        for at, each in zip(places, one_pass(x, a, bs, [ys[at] for at in places], slots), strict=True):
            ys[at] = each
        return mx.concatenate(ys, axis=-1)

    write_model(tmp_path / "model", config)
    loaded = load_model(EngineConfig(str(tmp_path / "model"), kv_limit_bytes=1 << 28))
    join_products(loaded.model)
    told = []
    for step in (lambda *of: None, lambda model, _: DecodeStep(model, compiles=False)):
        monkeypatch.setattr(row_model, "decode_step_of", step)
        made = {}
        for name, keys in (("a", ("self_attn.v_proj", "mlp.down_proj")), ("b", LINEARS)):
            folder = tmp_path / f"{name}{len(told)}"
            made[f"{name}@1"] = make_adapter(loaded.model, folder, name=name, keys=keys)
        with AdapterBench(loaded, made) as bench:
            for name in made:
                bench.publish(name)
                bench.submit(
                    row(f"on {name}", prompt_of(6, 1), name, max_tokens=8), row(f"beside {name}", prompt_of(6, 0))
                )
                bench.run()
            told.append({seq: (bench.tokens(seq), bench.logprobs(seq)) for seq in bench.events})
        monkeypatch.setattr(stacks, "best_kernel", lambda dtype: "fused")
        for module in (deltas, stacks):
            monkeypatch.setattr(module, "one_pass", one_pass)
            monkeypatch.setattr(module, "one_pass_joined", joined)
            monkeypatch.setattr(module, "one_pass_gated", gated)
            monkeypatch.setattr(module, "one_pass_normed", normed)
            monkeypatch.setattr(module, "gates", lambda *of: may)
            monkeypatch.setattr(module, "norms", lambda *of: may)
            monkeypatch.setattr(module, "may_end", lambda: may)
        monkeypatch.setattr(product.Product, "parts", halves)
        if ends == "taken apart":
            monkeypatch.setattr(deltas.Deltas, "joined", lambda *of: None)
        for module in (deltas, layer):
            monkeypatch.setattr(module, "whole", whole)
    for seq, (tokens, logprobs) in told[0].items():
        assert told[1][seq][0] == tokens
        assert told[1][seq][1] == pytest.approx(logprobs, abs=1e-5)  # products of other sizes may sum in other orders
    assert {(2,), (0, 1, 2), (0, 1)} == set(asked), "of v, of all of attention's inputs, of gate and up"
    assert len(ended) == (3 if may else 0), "gate and up, output and down"
    assert epsilons == ({config["rms_norm_eps"]} if may else set()), "one kernel each, compiled at the load"


WIDTH, KINDS = 8, ("joined", "gated", "added_and_normed")


def refused(monkeypatch: pytest.MonkeyPatch, *, fed: mx.Dtype = mx.float32, **how: Any) -> list[str]:
    """What no kernel does of joined inputs, gate and up, or an output, where deltas or arrays differ in this."""
    told = mx.zeros((1, WIDTH))
    for name in ("one_pass_joined", "one_pass_gated"):
        monkeypatch.setattr(deltas, name, lambda *of: told)
    monkeypatch.setattr(deltas, "one_pass_normed", lambda *of: (told, told))
    for name in ("gates", "norms", "may_end"):
        monkeypatch.setattr(deltas, name, lambda *of: True)
    x, rest = (mx.zeros((1, WIDTH), how.pop(name, mx.float32)) for name in ("x", "rest"))
    y = how.pop("y", mx.zeros((1, WIDTH)))
    b = mx.zeros((2, 8, WIDTH))
    plain = {"kernel": "fused", "dtype": mx.float32, "fits_fused": True}
    of_two = {"groups": (None, None), "biased": (False, False), "gained": (False, False), "places": (0, 1)}
    of_one = {"groups": (None,), "biased": (False,), "gained": (False,), "widths": (), "places": ()}
    two: Any = deltas.Deltas(**{**plain, **of_two, "widths": (WIDTH, WIDTH), **how})
    one: Any = deltas.Deltas(**{**plain, **of_one, **{k: v for k, v in how.items() if k not in ("widths", "places")}})
    held: Any = mx.zeros((2, WIDTH, 16)), (b, b), (), ()
    only: Any = mx.zeros((2, WIDTH, 8)), (b,), (), ()
    slots = mx.array([1], mx.uint32)
    results = (
        two.joined(held, slots, x, y),
        two.gated(held, slots, x, y),
        one.added_and_normed(only, slots, x, y, mx.zeros((1, WIDTH), fed), rest[0], 1e-6),
    )
    return [kind for kind, result in zip(KINDS, results, strict=True) if result is None]


def test_kernels_do_not_end_what_they_are_not_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(monkeypatch) == []
    assert refused(monkeypatch, y=mx.zeros((3, 1, WIDTH))) == [], "parts"
    for how in (
        {"gained": (True, True)},  # DoRA
        {"groups": ("ranks", "ranks")},
        {"kernel": "take"},
        {"x": mx.float16},
        {"y": mx.zeros((1, WIDTH), mx.float16)},
        {"y": mx.zeros((3, 1, WIDTH), mx.float16)},
    ):
        assert refused(monkeypatch, **how) == list(KINDS), how
    assert refused(monkeypatch, fed=mx.float16) == refused(monkeypatch, rest=mx.float16) == ["added_and_normed"]
    assert refused(monkeypatch, places=(1,)) == refused(monkeypatch, widths=(WIDTH, 16)) == ["gated"]


@pytest.mark.parametrize("form", ["gated", "joined", "normed"])
def test_a_kernel_that_fails_leaves_what_follows_to_others(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of parts alone, too: deltas are still computed by the kernel for them."""
    left = list[str]()

    def by(name: str) -> Callable[..., Any]:
        def made(x: mx.array, a: mx.array, bs: Any, y: mx.array, *of: Any) -> Any:
            if name == form and (y.ndim == 3 or name != "joined"):
                raise RuntimeError("no kernel")
            return mx.zeros(1)

        return made

    for name in ("gated", "joined", "normed"):
        monkeypatch.setattr(stacks, f"one_pass_{name}", by(name))
    for name in ("gates", "norms"):
        monkeypatch.setattr(stacks, name, lambda *of: True)
    monkeypatch.setattr(stacks, "one_pass", one_pass)
    monkeypatch.setattr(stacks, "may_end", lambda: not left)
    monkeypatch.setattr(stacks, "leave_endings", lambda: left.append(form))
    monkeypatch.setattr(stacks, "parts_of_many", lambda *of: 3)
    monkeypatch.setattr(stacks, "best_kernel", lambda dtype: "fused")
    write_model(tmp_path / "model", QWEN3)
    model = load_model(EngineConfig(str(tmp_path / "model"), kv_limit_bytes=1 << 28)).model
    join_products(model)
    made = make_adapter(model, tmp_path / "a", keys=LINEARS)
    adapted = stacks.AdaptedModel(model, 2, mx.float32)
    adapted.prepare_kernels(read_adapter(made.path, made.manifest, adapted.sites, mx.float32, 64))
    assert left == [form]
    assert adapted.rows.kernel == "fused"


def test_a_step_that_checks_drafts_is_of_few_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[tuple[str, int]] = []

    class Noting(DecodeStep):
        def __call__(self, tokens_BL: mx.array, *of: Any, **how: Any) -> mx.array:
            fed.append(("base", tokens_BL.shape[1]))
            return super().__call__(tokens_BL, *of, **how)

        def adapted(self, tokens_BL: mx.array, *of: Any, **how: Any) -> mx.array:
            fed.append(("adapted", tokens_BL.shape[1]))
            return super().adapted(tokens_BL, *of, **how)

    monkeypatch.setattr(row_model, "decode_step_of", lambda model, _: Noting(model, compiles=False))
    write_model(tmp_path / "model", QWEN3)
    loaded = load_model(EngineConfig(str(tmp_path / "model"), kv_limit_bytes=1 << 28))
    made = make_adapter(loaded.model, tmp_path / "a")
    drafts = SpeculationConfig(3, adapts_to_rows=False, adapts_to_time=False, own_text=False)
    with AdapterBench(loaded, {"a@1": made}, speculation=drafts) as bench:
        bench.publish("a@1")
        for of, adapter in (("base", ""), ("adapted", "a@1")):
            bench.submit(row(f"{of} alone", prompt_of(9, 1), adapter))
            bench.run()
            said = bench.tokens(f"{of} alone")
            assert {(of, 1)} == set(fed)
            fed.clear()
            bench.submit(row(f"{of} again", prompt_of(9, 1), adapter, prediction_ids=tuple(said)))
            bench.run()
            assert (of, 4) in fed and bench.tokens(f"{of} again") == said
            fed.clear()
