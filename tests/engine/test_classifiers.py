"""Hugging Face's classifiers and reward models are served as a model with a head of its own."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_model.config import EngineConfig
from mlx_model.loader import load_model
from shared.errors import SetupError
from shared.heads import HeadSpec
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.small_models import LLAMA, write_model

H = int(str(LLAMA["hidden_size"]))


def checkpoint(folder: Path, score: dict[str, tuple[int, ...]], **config: Any) -> Path:
    """A Llama as `LlamaForSequenceClassification.save_pretrained` writes it: no output layer, and `score`."""
    write_model(folder, LLAMA)
    tensors: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    del tensors["lm_head.weight"]
    mx.random.seed(5)
    tensors |= {name: mx.random.normal(shape) for name, shape in score.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    architectures = {"architectures": ["LlamaForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(LLAMA | architectures | config))
    return folder


@pytest.mark.parametrize(
    ("outputs", "config", "expected"),
    [
        (1, {"num_labels": 1, "id2label": {"0": "LABEL_0"}}, HeadSpec("scalar", inputs=H)),
        (1, {"problem_type": "regression"}, HeadSpec("scalar", inputs=H)),
        (3, {"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, HeadSpec("labels", ("no", "maybe", "yes"), inputs=H)),
        (2, {"num_labels": 2}, HeadSpec("labels", ("LABEL_0", "LABEL_1"), inputs=H)),
    ],
)
def test_its_head_reads_the_last_hidden_state(
    tmp_path: Path, outputs: int, config: dict[str, Any], expected: HeadSpec
) -> None:
    folder = checkpoint(tmp_path, {"score.weight": (outputs, H)}, **config)
    loaded = load_model(EngineConfig(str(folder)))
    assert loaded.card.heads == {"score": expected} and loaded.card.hidden_size == H
    assert type(loaded.model).__module__ == "mlx_lm.models.llama"  # by which batching.py knows what it may do
    ids = prompt_of(40)
    bench = Bench(loaded)
    bench.submit(SequenceSpec("v", "m", tuple(ids), SamplingParams(0, 0), kind="head", head="score"), spec("s", ids))
    bench.run()
    state_H = np.array(loaded.model.model(mx.array([ids]))[0, -1].astype(mx.float32))
    weight = np.array(mx.load(str(folder / "model.safetensors"))["score.weight"])  # type: ignore[call-overload,index]
    np.testing.assert_allclose(
        np.frombuffer(bench.events["v"][0].embedding or b"", "<f4"), weight @ state_H, rtol=1e-5, atol=1e-5
    )
    assert len(bench.tokens("s")) == 8  # it decodes, if to no purpose


@pytest.mark.parametrize(
    ("score", "config", "word"),
    [
        ({}, {}, "no score.weight"),
        ({"score.0.weight": (8, H), "score.2.weight": (1, 8)}, {}, "score.0.weight, score.2.weight"),
        ({"score.weight": (2, H)}, {"num_labels": 3}, "which is 2"),
        ({"score.weight": (2, H)}, {"id2label": {"0": "a", "1": "a"}}, "the same"),
        ({"score.weight": (1, H - 1)}, {}, "expected (1, 64)"),
        ({"score.weight": (2, H)}, {"problem_type": "multi_label_classification"}, "several labels"),
        ({"score.weight": (2, H)}, {"problem_type": "regression"}, "regression of 2"),
    ],
)
def test_what_cannot_be_served_as_it_is_meant_is_refused(
    tmp_path: Path, score: dict[str, tuple[int, ...]], config: dict[str, Any], word: str
) -> None:
    folder = checkpoint(tmp_path, score, **config)
    with pytest.raises(SetupError, match=r"cannot load the model") as refused:
        load_model(EngineConfig(str(folder)))
    assert word in str(refused.value)


@pytest.mark.parametrize("name", ["score.weight", "score.bias"])
def test_a_head_with_a_value_that_is_not_finite_is_refused(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path, {"score.weight": (2, H), "score.bias": (2,)})
    tensors: dict[str, mx.array] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    tensors[name] = tensors[name].at[-1].add(mx.nan)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tensors), {"format": "pt"})
    with pytest.raises(SetupError, match=f"{name} holds a value that is not finite"):
        load_model(EngineConfig(str(folder)))
