"""Heads in adapter files: alone or beside a LoRA, what is taken, and every refusal."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from shared.adapter_files.config import mlx_config as written_config
from shared.adapter_files.config import read_config
from shared.adapter_files.formats import prepare_directory, prepared
from shared.errors import AdapterRejectedError, InvalidRequestError
from shared.heads import HeadSpec, choose, choose_policy
from tests.unit.adapter_files import Array, lora, mlx_config, peft_config, peft_tensors, write

H = 12
SCALAR = {"reward": {"kind": "scalar"}}
TOPICS = {"topic": {"kind": "labels", "labels": ["a", "b", "c"], "activation": "gelu"}}


def head(
    name: str = "reward", outputs: int = 1, inputs: int = H, *, hidden: int = 0, bias: bool = True
) -> dict[str, Array]:
    draw = np.random.default_rng(1)
    shapes = {"weight": (outputs, hidden or inputs)}
    if bias:
        shapes["bias"] = (outputs,)
    if hidden:
        shapes |= {"hidden.weight": (hidden, inputs), "hidden.bias": (hidden,)}
    return {f"heads.{name}.{part}": draw.standard_normal(shape).astype(np.float32) for part, shape in shapes.items()}


def refused(tmp_path: Path, config: dict[str, Any], tensors: dict[str, Array]) -> str:
    folder = write(tmp_path / "adapter", config, tensors)
    with pytest.raises(AdapterRejectedError) as caught:
        prepare_directory(folder, tmp_path, hidden_size=H)
    assert caught.value.status == 400
    return caught.value.message


def test_heads_alone_are_an_adapter(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", {"heads": SCALAR | TOPICS}, head(bias=False) | head("topic", 3, hidden=5))
    with prepared(folder, hidden_size=H) as adapter:
        assert (adapter.kind, adapter.rank, adapter.modules) == ("head", 0, ())
        assert adapter.heads["reward"] == HeadSpec("scalar", inputs=H)
        assert adapter.heads["topic"] == HeadSpec("labels", ("a", "b", "c"), "gelu", inputs=H, hidden=5)


def test_policy_heads_have_an_output_for_each_action_or_two_for_each_of_its_numbers(tmp_path: Path) -> None:
    heads = {"policy": {"kind": "categorical", "labels": ["a", "b", "c"]}, "force": {"kind": "gaussian", "size": 2}}
    folder = write(tmp_path / "adapter", {"heads": heads}, head("policy", 3) | head("force", 4))
    with prepared(folder, hidden_size=H) as adapter:
        assert adapter.heads["policy"] == HeadSpec("categorical", ("a", "b", "c"), inputs=H)
        assert adapter.heads["force"] == HeadSpec("gaussian", size=2, inputs=H)
        data = written_config("head", 0, 1.0, (), adapter.heads)
        assert read_config(data).heads == adapter.heads
        assert (choose_policy(adapter.heads), choose_policy(adapter.heads, "force")) == ("policy", "force")
    assert choose_policy({"policy": HeadSpec("scalar")}) == "" == choose_policy({}, "force")


@pytest.mark.parametrize("peft", [False, True])
def test_a_lora_may_have_heads_beside_it_in_either_format(tmp_path: Path, peft: bool) -> None:
    config, tensors = (peft_config, peft_tensors(lora())) if peft else (mlx_config, lora())
    folder = write(tmp_path / "adapter", config(heads=SCALAR), tensors | head())
    with prepared(folder, hidden_size=H) as adapter:
        assert adapter.kind == "lora" and adapter.heads.keys() == {"reward"} and len(adapter.modules) == 2
        stored = load_file(adapter.path)
    for key, tensor in head().items():
        np.testing.assert_array_equal(stored[key], tensor)


def test_the_written_configuration_is_read_as_the_same_heads(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", mlx_config(heads=TOPICS), lora() | head("topic", 3, hidden=5))
    with prepared(folder) as adapter:
        for kind in ("lora", "head"):
            data = written_config(kind, adapter.rank, adapter.scale, adapter.modules, adapter.heads)  # type: ignore[arg-type]
            assert read_config(data).heads == adapter.heads


def test_without_heads_the_written_configuration_says_nothing_of_them() -> None:
    assert b"heads" not in written_config("lora", 4, 1.0, ("model.layers.0.self_attn.q_proj",))


@pytest.mark.parametrize(
    ("heads", "tensors", "word"),
    [
        ({"force": {"kind": "gaussian", "size": 2}}, head("force", 2, bias=False), "expected [4, 12]"),
        ({"force": {"kind": "gaussian"}}, head("force", 2), "a size of 1 to 1024, here is 0"),
        ({"reward": {"kind": "scalar", "size": 2}}, head(), "a size belongs to"),
        ({"policy": {"kind": "categorical", "labels": ["a"]}}, head("policy"), "'categorical' has 2 to 1024"),
        (SCALAR, head(inputs=13), "expected [1, 12]"),
        (SCALAR, head(outputs=2, bias=False), "expected [1, 12]"),
        (SCALAR, head("other"), "the file has no tensors"),
        (SCALAR, head() | head("other"), "heads.other"),
        (SCALAR, head() | {"heads.reward.code": np.ones(3, np.float32)}, "heads.reward.code"),
        (SCALAR, head(hidden=5), "no 'activation'"),
        (SCALAR, head() | {"heads.reward.bias": np.array([np.nan], np.float32)}, "bias: value 0 is not finite"),
        (SCALAR, head() | {"heads.reward.weight": np.full((1, H), 3e38, np.float32)}, "which is not finite in float32"),
        (SCALAR, head() | {"heads.reward.bias": np.ones(2, np.float32)}, "expected [1]"),
        (SCALAR, head() | {"heads.reward.hidden.bias": np.ones(2, np.float32)}, "there is no hidden layer"),
        (SCALAR, {"heads.reward.bias": np.ones(1, np.float32)}, "weight is missing"),
        (SCALAR, {"heads.reward.weight": np.ones(H, np.float32)}, "two dimensions"),
        (SCALAR, head() | lora(), "describes heads alone"),
        ({"reward": {"kind": "scalar", "inputs": 13}}, head(), "says inputs 13"),
        ({"reward": {"kind": "scalar", "activation": "gelu"}}, head(), "no hidden.weight"),
        (TOPICS, head("topic", 3, hidden=5, inputs=13), "expected [5, 12]"),
        (TOPICS, head("topic", 2, hidden=5, bias=False), "expected [3, 5]"),
    ],
)
def test_tensors_that_do_not_fit_their_description_are_refused(
    tmp_path: Path, heads: dict[str, Any], tensors: dict[str, Array], word: str
) -> None:
    assert word in refused(tmp_path, {"heads": heads}, tensors)


@pytest.mark.parametrize(
    ("heads", "word"),
    [
        ({"Reward": {"kind": "scalar"}}, "'Reward'"),
        ({f"h{at}": {"kind": "scalar"} for at in range(17)}, "at most 16"),
        ({"reward": {"kind": "gaussian"}}, "gaussian"),
        ({"reward": {"kind": "scalar", "labels": ["a", "b"]}}, "labels"),
        ({"reward": {"kind": "scalar", "code": "import os"}}, "'code'"),
        ({"reward": {"kind": "scalar", "pooling": "mean"}}, "mean"),
        ({"reward": {"kind": "scalar", "activation": "sin"}}, "sin"),
        ({"reward": "scalar"}, "heads.reward"),
        ({"topic": {"kind": "labels", "labels": ["a"]}}, "heads.topic"),
        ({"topic": {"kind": "labels", "labels": ["a", "a"]}}, "the same"),
        ({"topic": {"kind": "labels", "labels": ["a", ""]}}, "characters"),
        ("reward", "object"),
    ],
)
def test_a_description_that_is_none_is_refused_with_its_name(tmp_path: Path, heads: Any, word: str) -> None:
    assert word in refused(tmp_path, {"heads": heads}, head())


def test_a_head_on_a_base_without_hidden_states_is_refused_and_a_lora_is_taken(tmp_path: Path) -> None:
    folder = write(tmp_path / "heads", {"heads": SCALAR}, head())
    with pytest.raises(AdapterRejectedError, match=r"heads\.reward: the base shows no hidden states"):
        prepare_directory(folder, tmp_path, hidden_size=None)
    assert prepare_directory(write(tmp_path / "lora", mlx_config(), lora()), tmp_path, hidden_size=None).heads == {}
    assert prepare_directory(folder, tmp_path, hidden_size=0).heads, "not known: the worker that loads it checks"


def test_a_head_that_is_too_large_to_be_read_between_two_steps_is_refused(tmp_path: Path) -> None:
    labels = [f"l{at}" for at in range(1024)]
    heads = {"topic": {"kind": "labels", "labels": labels, "activation": "gelu"}}
    wide = {name: np.zeros(shape, np.float16) for name, shape in (
        ("heads.topic.weight", (1024, 16_384)), ("heads.topic.hidden.weight", (16_384, H)),
    )}  # fmt: skip
    assert "heads.topic: it has 16,973,824 weights; a head may have 16,777,216" in refused(
        tmp_path, {"heads": heads}, wide
    )
    assert HeadSpec("labels", tuple(labels), inputs=16_384).outputs == 1024, "a linear one of any usual width is taken"


def test_which_head_is_meant() -> None:
    one, two = HeadSpec("scalar"), HeadSpec("labels", ("a", "b"))
    assert choose({"x": one, "topic": two}, "scalar") == "x"
    assert choose({"x": one, "reward": one}, "scalar", usual="reward") == "reward"
    assert choose({"x": one, "reward": one}, "scalar", "x", usual="reward") == "x"
    assert choose({"x": one}, "labels") == choose({}, "scalar") == choose({"x": one, "t": two}, "scalar", "t") == ""
    with pytest.raises(InvalidRequestError, match="name one of x, y") as caught:
        choose({"x": one, "y": one}, "scalar")
    assert caught.value.param == "head"


def test_a_manifest_of_a_newer_process_with_more_to_say_of_a_head_is_read() -> None:
    assert msgspec.json.decode(b'{"kind": "scalar", "more": 1}', type=HeadSpec) == HeadSpec("scalar")
