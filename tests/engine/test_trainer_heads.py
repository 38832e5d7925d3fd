"""The head over some positions at a time: same numbers and gradients as over all of them."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import cohere, gemma2, llama, qwen3

from tests.engine.small_models import LLAMA, QWEN3
from trainer.learn.batches import Sample, SampleGroup, pad
from trainer.learn.logprobs import CHUNK_LOGITS, BatchArrays, cut, head_chunk, row_scores, shared_scores, to_arrays
from trainer.learn.options import AdapterShape
from trainer.learn.policy import Policy

VOCABULARY = 300
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
GEMMA2 = {**SIZES, "model_type": "gemma2", "intermediate_size": 64, "head_dim": 8, "vocab_size": VOCABULARY}
GEMMA2 |= {"rms_norm_eps": 1e-6, "final_logit_softcapping": 2.0, "num_key_value_heads": 4}
COHERE = {**SIZES, "model_type": "cohere", "intermediate_size": 64, "vocab_size": VOCABULARY, "logit_scale": 0.5}
MODELS = {"llama": (llama, LLAMA), "qwen3": (qwen3, QWEN3), "gemma2": (gemma2, GEMMA2), "cohere": (cohere, COHERE)}


def model_of(name: str) -> Any:
    module, config = MODELS[name]
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


def arrays() -> BatchArrays:
    rng = np.random.default_rng(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(0, VOCABULARY, n))

    def sample(n: int) -> Sample:
        return Sample(ids(n), (-2.0,) * n, (True,) * n, (0,) * n, float(rng.normal()))

    return to_arrays(pad([SampleGroup("a", ids(3), (sample(5), sample(7))), SampleGroup("b", ids(9), (sample(2),))]))


@pytest.mark.parametrize("name", MODELS)
def test_the_head_is_all_that_follows_the_body(name: str) -> None:
    model = model_of(name)
    tokens_BL = mx.array([[5, 6, 7, 8]])
    halves = cut(model)
    assert halves is not None
    assert mx.allclose(halves.head(halves.body(tokens_BL)), model(tokens_BL), atol=1e-6)
    assert head_chunk(model) == CHUNK_LOGITS // model(tokens_BL).shape[-1]


@pytest.mark.parametrize("scores", [shared_scores, row_scores])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_and_gradients_do_not_depend_on_the_chunk(name: str, scores: Callable[..., Any]) -> None:
    policy = Policy(model_of(name), AdapterShape())
    x = arrays()
    found = []
    for chunk in (0, 1, 4, 5, 1000):

        def loss(tree: Any, chunk: int = chunk) -> mx.array:
            logp_BT, entropy_BT, _ = scores(tree, x, chunk=chunk)
            return mx.where(x.mask_BT, logp_BT + 0.1 * entropy_BT, 0.0).sum()

        value, gradient = nn.value_and_grad(policy.model, loss)(policy.model)
        found.append((value, dict(tree_flatten(gradient))))
    assert any(mx.abs(part).max() > 0.01 for part in found[0][1].values())
    for value, gradient in found[1:]:
        assert value.item() == pytest.approx(found[0][0].item(), rel=1e-5)
        for path, part in gradient.items():
            assert mx.allclose(part, found[0][1][path], rtol=1e-3, atol=1e-5), path


def test_a_model_whose_head_needs_more_than_hidden_states_keeps_its_logits_whole() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Embedding(8, 4)
            self.out = nn.Linear(4, 8)

        def __call__(self, tokens: mx.array) -> mx.array:
            return self.out(self.model(tokens)) + tokens[..., None]

    assert head_chunk(Odd()) == 0
