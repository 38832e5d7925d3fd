from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import ministral3
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load

from mlx_model import learning
from mlx_model.kv.kinds import can_share
from mlx_model.kv.padded import TILE, Masks, PaddedRead
from mlx_model.learning import LearningLoRA
from mlx_model.loader import LoadedModel
from mlx_model.lora.layers import SiteWeights
from mlx_model.lora.stacks import AdaptedModel
from tests.engine.kv_models import RECURRENT, WINDOW, WINDOWED, small
from tests.engine.small_models import LLAMA, QWEN3, write_model
from trainer.learn import logprobs
from trainer.learn import policy as policy_module
from trainer.learn.adam import all_finite
from trainer.learn.batches import PADDING, Microbatch, Padding, Sample, SampleGroup, pad
from trainer.learn.logprobs import BatchArrays, Halves, can_share_prompts, row_scores, shared_scores, to_arrays
from trainer.learn.options import AdapterShape
from trainer.learn.policy import Policy, share_tree
from trainer.learn.prompt_kv import OnePass
from trainer.state import Arrays
from trainer.versions.checkpoint import write_adapter

ModelOf = Callable[..., Any]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    def make(config: dict[str, object] = LLAMA, bits: int | None = None, dtype: mx.Dtype = mx.float32) -> Any:
        name = f"{config['model_type']}-{bits}"
        folder = tmp_path_factory.getbasetemp() / name
        if not folder.exists():
            write_model(folder, config, bits=bits)
        model, _ = load(str(folder))
        model.set_dtype(dtype)
        mx.eval(model.parameters())
        return model

    return make


def microbatch(vocabulary: int = 300, longest: int = 9, padding: Padding = PADDING) -> Microbatch:
    rng = np.random.default_rng(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(0, vocabulary, n))

    def sample(n: int) -> Sample:
        return Sample(ids(n), (-2.0,) * n, (True,) * n, (0,) * n, float(rng.normal()))

    groups = [
        SampleGroup("a", ids(3), (sample(5), sample(1), sample(4))),
        SampleGroup("b", ids(longest), (sample(2), sample(6))),
    ]
    return pad(groups, padding)


def moved(policy: Policy, size: float = 0.05) -> Arrays:
    """Adapter weights that are not zero anywhere."""
    rng = np.random.default_rng(1)
    return {
        name: value + rng.normal(0, size, value.shape).astype(np.float32) for name, value in policy.weights().items()
    }


def test_the_base_arrays_are_shared_not_copied(model_of: ModelOf) -> None:
    model = model_of()
    policy = Policy(model, AdapterShape())
    mine = {id(value) for _, value in tree_flatten(model.parameters())}
    assert {id(value) for _, value in tree_flatten(policy.base.parameters())} == mine
    learned = {id(value) for _, value in tree_flatten(policy.model.trainable_parameters())}
    assert {id(value) for _, value in tree_flatten(policy.model.parameters())} - learned == mine
    assert len(learned) == len(policy.weights())


def test_a_new_adapter_changes_nothing_and_the_base_stays_trainable(model_of: ModelOf) -> None:
    model = model_of()
    trainable = len(tree_flatten(model.trainable_parameters()))
    x = mx.array([[1, 2, 3, 4]])
    expected = model(x)
    policy = Policy(model, AdapterShape())
    assert mx.array_equal(policy.model(x), expected)
    assert len(tree_flatten(model.trainable_parameters())) == trainable, "freezing the policy froze the model"


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_reference_is_the_base_whatever_the_adapter(model_of: ModelOf, kind: Any) -> None:
    model = model_of()
    policy = Policy(model, AdapterShape(kind=kind))
    policy.load(moved(policy))
    x = mx.array([[5, 6, 7]])
    assert mx.array_equal(policy.base(x), model(x))
    assert not mx.allclose(policy.model(x), model(x), atol=1e-2)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize(("bits", "dtype"), [(None, mx.float32), (None, mx.bfloat16), (4, mx.float32)])
def test_mlx_lm_loads_what_the_policy_computes(
    model_of: ModelOf, tmp_path: Path, kind: Any, bits: int | None, dtype: mx.Dtype
) -> None:
    policy = Policy(model_of(bits=bits, dtype=dtype), AdapterShape(kind=kind, rank=4))
    policy.load(moved(policy))
    assert all(value.dtype == np.float32 for value in policy.weights().values()), "adapter maths is fp32"
    write_adapter(tmp_path, policy.weights(), policy.config())
    theirs = load_adapters(model_of(bits=bits, dtype=dtype), str(tmp_path))
    x = mx.array([[1, 2, 3, 4, 5]])
    assert mx.allclose(theirs(x).astype(mx.float32), policy.model(x).astype(mx.float32), atol=1e-5)


@pytest.mark.parametrize("largest", [policy_module.LARGEST_ARRAY, 10])
def test_copies_have_the_bytes_of_the_arrays_in_one_transfer_or_in_several(
    model_of: ModelOf, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(model_of(), AdapterShape(kind="dora"))
    policy.load(moved(policy))
    monkeypatch.setattr(policy_module, "LARGEST_ARRAY", largest)
    copies = policy.weights()
    assert list(copies) == list(policy.arrays())
    for name, value in policy.arrays().items():
        assert copies[name].shape == value.shape and copies[name].tobytes() == np.array(value).tobytes()
        assert not copies[name].flags.writeable


def test_an_adapter_of_another_shape_is_refused(model_of: ModelOf) -> None:
    policy = Policy(model_of(), AdapterShape(rank=4))
    other = Policy(model_of(), AdapterShape(rank=8))
    with pytest.raises(ValueError, match=r"does not fit this policy: model\.layers"):
        policy.load(other.weights())


def test_gradients_of_a_base_in_float16_are_those_of_fp32(model_of: ModelOf) -> None:
    """A mean over 2^20 terms, whose parts float16 has no numbers for."""
    terms, found = 1 << 20, list[dict[str, mx.array]]()
    x = to_arrays(microbatch())
    for dtype in (mx.float32, mx.float16):
        policy = Policy(model_of(dtype=dtype), AdapterShape(rank=4))
        policy.load(moved(policy, 0.01))

        def mean(model: Any, dtype: mx.Dtype) -> tuple[mx.array, mx.Dtype]:
            return mx.where(x.mask_BT, shared_scores(model, x).logp_BT, 0.0).sum() / terms, dtype

        (value, passed), gradient = policy.value_and_grad(mean, terms, dtype)
        assert passed == dtype and -1e-3 < value.item() < 0
        found.append(dict(tree_flatten(gradient)))
    for name, wanted in found[0].items():
        assert mx.linalg.norm(found[1][name] - wanted) < 0.05 * mx.linalg.norm(wanted), name


def test_a_loss_that_is_too_large_for_float16_is_scaled_less(model_of: ModelOf) -> None:
    """A sum, whose gradient has no more room than a few more bits."""
    terms, found = 1 << 20, list[Any]()
    x = to_arrays(microbatch())
    for dtype in (mx.float32, mx.float16):
        policy = Policy(model_of(dtype=dtype), AdapterShape(rank=4))
        policy.load(moved(policy, 0.01))

        def total(model: Any) -> mx.array:
            return mx.where(x.mask_BT, shared_scores(model, x).logp_BT, 0.0).sum()

        for _ in range(2):  # the second one begins with what the first one ended with
            found.append(dict(tree_flatten(policy.value_and_grad(total, terms)[1])))
    for name, wanted in found[0].items():
        for gradient in found[2:]:
            assert mx.linalg.norm(gradient[name] - wanted) < 0.05 * mx.linalg.norm(wanted), name


@pytest.mark.parametrize(("count", "positions"), [(100, 164), (128, 192), (1, 64)])
def test_fused_attention_gets_whole_tiles(count: int, positions: int) -> None:
    queries, keys, values = (
        mx.random.normal((2, heads, length, 16), key=mx.random.key(at))
        for at, (heads, length) in enumerate([(4, count), (2, positions), (2, positions)])
    )
    mask = mx.arange(positions) <= mx.arange(positions - count, positions)[:, None]
    shapes = list[tuple[int, int]]()

    def fused(queries: mx.array, keys: mx.array, values: mx.array, **how: Any) -> mx.array:
        shapes.append((queries.shape[2], keys.shape[2]))
        assert keys.shape == values.shape
        return mx.fast.scaled_dot_product_attention(queries, keys, values, **how)

    for given in (mask, mx.broadcast_to(mask, (2, 1, count, positions))):
        found = PaddedRead(keys, values, Masks()).attended(fused, queries, 0.25, given, None)
        wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask=given)
        assert mx.allclose(found, wanted, atol=1e-5)
    assert all(size % TILE == 0 for shape in shapes for size in shape)


def test_targets_name_the_ends_of_paths(model_of: ModelOf) -> None:
    policy = Policy(model_of(), AdapterShape(targets=("q_proj", "v_proj")))
    assert {module.rsplit(".", 1)[1] for module in policy.modules} == {"q_proj", "v_proj"}
    with pytest.raises(ValueError, match="no linear layer matches"):
        Policy(model_of(), AdapterShape(targets=("query",)))


def test_gradient_checkpointing_touches_our_instances_only(model_of: ModelOf) -> None:
    """mlx-lm's grad_checkpoint patches the layer's class, and slows the generator that shares it."""
    model = model_of()
    cls = type(model.layers[0])
    forward = cls.__call__
    plain, saving = Policy(model, AdapterShape()), Policy(model, AdapterShape(), checkpoint_layers=True)
    assert cls.__call__ is forward and type(model.layers[0]) is cls and type(saving.base.layers[0]) is cls
    assert type(saving.model.layers[0]) is not cls
    weights = moved(plain)
    x = to_arrays(microbatch())
    gradients = []
    for policy in (plain, saving):
        policy.load(weights)

        def loss(tree: Any) -> mx.array:
            return mx.where(x.mask_BT, row_scores(tree, x).logp_BT, 0.0).sum()

        gradients.append(dict(tree_flatten(nn.value_and_grad(policy.model, loss)(policy.model)[1])))
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        assert mx.allclose(value, gradients[1][name], rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_a_shared_prompt_gives_the_numbers_and_gradients_of_whole_rows(
    model_of: ModelOf, config: dict[str, object]
) -> None:
    policy = Policy(model_of(config), AdapterShape())
    policy.load(moved(policy))
    x = to_arrays(microbatch())
    assert can_share_prompts(policy.base)
    values: list[Any] = []
    gradients: list[Any] = []
    for scores in (shared_scores, row_scores):

        def loss(tree: Any, scores: Any = scores) -> mx.array:
            logp_BT, entropy_BT, _ = scores(tree, x)
            return mx.where(x.mask_BT, logp_BT + 0.1 * entropy_BT, 0.0).sum()

        logp_BT, entropy_BT, _ = scores(policy.model, x)
        values.append((mx.where(x.mask_BT, logp_BT, 0.0), mx.where(x.mask_BT, entropy_BT, 0.0)))
        gradients.append(dict(tree_flatten(nn.value_and_grad(policy.model, loss)(policy.model)[1])))
    for mine, theirs in zip(*values, strict=True):
        assert mx.allclose(mine, theirs, atol=1e-4)
    for name, value in gradients[0].items():
        assert mx.allclose(value, gradients[1][name], rtol=1e-3, atol=1e-3), name


def test_a_model_that_has_no_numbers_before_its_first_position_computes_rows() -> None:
    """Ministral 3 scales queries by the logarithm of their position."""
    scaling = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "num_attention_heads": 2}
    rest = {"head_dim": 16, "vocab_size": 300, "rms_norm_eps": 1e-6, "max_position_embeddings": 256}
    config = {"model_type": "ministral3", **sizes, **rest, "tie_word_embeddings": True, "rope_parameters": scaling}
    model = ministral3.Model(ministral3.ModelArgs.from_dict(config))
    policy, x = Policy(model, AdapterShape()), to_arrays(microbatch())
    assert not can_share_prompts(model) and not can_share_prompts(model, tries=False)

    def loss(tree: Any) -> mx.array:
        return mx.where(x.mask_BT, policy.scores(tree, x).logp_BT, 0.0).sum()

    assert all_finite(nn.value_and_grad(policy.model, loss)(policy.model))


@pytest.mark.parametrize("has_own_mask", [False, True])
def test_prompts_and_completions_take_one_forward_pass_in_the_shapes_of_fused_attention(
    model_of: ModelOf, has_own_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless attention gets a mask that is not of ours."""
    model = model_of(LLAMA)
    assert can_share(model, make_prompt_cache(model)) == "keys"
    x = to_arrays(microbatch(padding=Padding(last=1)))
    inputs = []
    halves_of = logprobs.halves_of

    def counted(model: Any, chunk: int) -> Halves:
        body, head = halves_of(model, chunk)

        def called(ids: mx.array, **how: Any) -> mx.array:
            inputs.append(ids.shape)
            return body(ids, **how)

        return Halves(called, head)

    monkeypatch.setattr(logprobs, "halves_of", counted)
    if has_own_mask:
        monkeypatch.setattr(OnePass, "make_mask", lambda *_, **__: mx.array(True))
    found_BT = shared_scores(model, x, reads="fused", chunk=5).logp_BT
    assert inputs == ([(9, 8), (2, 16), (5, 8)] if has_own_mask else [(9, 8)])
    wanted_BT = row_scores(model, x).logp_BT
    assert mx.allclose(mx.where(x.mask_BT, found_BT, 0.0), mx.where(x.mask_BT, wanted_BT, 0.0), atol=1e-4)


def test_lora_in_bfloat16_is_that_of_fp32_but_for_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU rounds parameters for its products; their gradients stay fp32."""
    linear = nn.Linear(64, 96, bias=False)
    linear.weight = linear.weight.astype(mx.bfloat16)
    layer = LearningLoRA.from_base(linear, r=8, scale=2.0)
    layer.freeze()
    layer.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
    layer.lora_b = mx.random.normal((8, 96), key=mx.random.key(1)) * 0.1
    x = mx.random.normal((2, 5, 64), key=mx.random.key(2)).astype(mx.bfloat16)
    found = []
    for cpu in (True, False):
        monkeypatch.setattr(learning, "on_cpu", lambda cpu=cpu: cpu)
        y, gradient = nn.value_and_grad(layer, lambda tree: mx.square(tree(x).astype(mx.float32)).sum())(layer)
        found.append({"y": y, **dict(tree_flatten(gradient))})
    assert found[0].keys() == {"y", "lora_a", "lora_b"}
    for name, wanted in found[0].items():
        assert found[1][name].dtype == wanted.dtype == mx.float32
        assert 0 < mx.max(mx.abs(found[1][name] - wanted)).item() <= 0.02 * mx.max(mx.abs(wanted)).item(), name


@pytest.mark.long
@pytest.mark.parametrize("name", [*WINDOWED, *RECURRENT, "deepseek_v3", "qwen3"])
def test_layers_of_every_kind_hand_their_prompt_on_with_its_gradients(
    name: str, llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window, too, that most of a prompt lies before; keys and values are copied, then read where they are, then in
    the shapes of CUDA's fused attention, there also in one forward pass with the prompts.
    """
    policy = Policy(small(name, llama).model, AdapterShape())
    policy.load(moved(policy))
    x, wide = (to_arrays(microbatch(longest=3 * WINDOW, padding=each)) for each in (PADDING, Padding(last=1)))
    shared = policy.scores
    assert isinstance(shared, partial) and (shared.keywords["reads"] is None) == (name == "mamba2")

    def gradient(scores: Any, x: BatchArrays = x) -> tuple[float, dict[str, mx.array]]:
        def loss(tree: Any) -> mx.array:
            return mx.where(x.mask_BT, scores(tree, x).logp_BT, 0.0).sum()

        value, arrays = nn.value_and_grad(policy.model, loss)(policy.model)
        return value.item(), dict(tree_flatten(arrays))

    value, expected = gradient(row_scores)
    fused = partial(
        shared_scores, reads="fused" if shared.keywords["reads"] == "keys" else None, chunk=5, learns="logp"
    )
    # In the last one's shapes prompts and completions take one forward pass, if all layers are of full attention.
    for scores, least, given in ((shared, 1 << 40, x), (shared, 0, x), (fused, 1 << 40, x), (fused, 1 << 40, wide)):
        monkeypatch.setattr(logprobs, "LEAST_SPARED", least)
        ours, found = gradient(scores, given)
        assert ours == pytest.approx(value, rel=1e-5)
        close = 1e-4 if name in RECURRENT else 1e-5
        for path, array in expected.items():
            assert (mx.max(mx.abs(array - found[path])) <= close * mx.max(mx.abs(array))).item(), path


def test_scores_are_those_of_a_forward_pass_without_padding(model_of: ModelOf) -> None:
    model = model_of()
    batch = microbatch()
    x = to_arrays(batch)
    logp_BT = np.array(shared_scores(model, x).logp_BT)
    for row, prompt in enumerate(batch.prompt_of_B):
        ids = [*batch.prompt_PS[prompt, batch.padding_P[prompt] :], *batch.completion_BT[row, batch.mask_BT[row]]]
        logits = model(mx.array([list(map(int, ids))]))[0].astype(mx.float32)
        logp = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        start = len(ids) - int(batch.mask_BT[row].sum())
        expected = [logp[position - 1, ids[position]] for position in range(start, len(ids))]
        assert logp_BT[row, batch.mask_BT[row]].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_tree_shared_with_a_serving_model_leaves_the_engines_adapters_out(model_of: ModelOf) -> None:
    """Hosted in a worker, the base is wrapped by the engine's adapter layers when the trainer comes."""
    model = model_of(QWEN3)  # its output layer is its embedding
    x = mx.array([[1, 2, 3]])
    expected = model(x)
    serving = AdaptedModel(model, 2, mx.float32)
    weights = {
        path: SiteWeights(mx.ones((site.inputs, 2)), mx.ones((2, site.outputs)) * 0.1)
        for path, site in serving.sites.items()
    }
    for arrays in serving.fill(1, weights):
        mx.eval(arrays)
    serving.select([1], dora=False)
    policy = Policy(model, AdapterShape())
    assert not mx.allclose(model(x), expected, atol=1e-2), "the worker serves with its adapter"
    assert mx.array_equal(share_tree(model)(x), expected)
    assert mx.array_equal(policy.base(x), expected)
    assert mx.array_equal(policy.model(x), expected)
    assert policy.modules[0] == "model.layers.0.mlp.down_proj"
