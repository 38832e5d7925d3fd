"""Folders of models that see: what is loaded of them, and which are refused, in words."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest

pytest.importorskip("mlx_vlm")

from mlx_model.config import EngineConfig
from mlx_model.loader import load_model
from mlx_model.vision.families import check_known, is_vision
from shared.errors import SetupError
from tests.engine.conftest import Bench, spec
from tests.engine.vision_bench import Gaze
from tests.engine.vision_models import WHAT, alone, picture, whole_model, write_vision_model


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "lfm2_vl", "gemma3"])
def test_a_quantised_checkpoint_is_seen_with(family: str, tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "small", family, bits=8)
    loaded = load_model(EngineConfig(str(folder)))
    assert loaded.card.quantization == "8 bits, groups of 32"
    from mlx_vlm.utils import load_model as load_whole

    bench = Gaze(loaded)
    bench.ask("one", WHAT, [picture(1)])
    bench.run()
    bench.check(load_whole(folder))


def test_a_folder_that_is_not_as_it_should_be_is_refused_in_words(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "molmo"}))
    with pytest.raises(
        SetupError, match="family 'molmo' are not supported; these are: idefics3, smolvlm, pixtral, mistral3"
    ):
        load_model(EngineConfig(str(folder)))
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": settings.pop("chat_template")}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "<image>" in load_model(EngineConfig(str(folder))).tokenizer.chat_template
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 64}))
    with pytest.raises(SetupError, match="64 tokens a tile"):
        load_model(EngineConfig(str(folder)))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "lfm2_vl", "gemma3"])
def test_of_a_folder_without_a_tower_the_text_is_served(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_vision_model(tmp_path / "small", family)
    weights = mx.load(str(folder / "model.safetensors"))
    text = {name: array for name, array in weights.items() if name.startswith("language_model")}
    mx.save_safetensors(str(folder / "model.safetensors"), text, {"format": "mlx"})
    (folder / "preprocessor_config.json").unlink()
    bench = Bench(load_model(EngineConfig(str(folder))))
    assert bench.loaded.card.vision is None and f"engine.images_refused family={family}" in caplog.text
    asked = spec("text", range(5, 25))
    bench.submit(asked)
    bench.run()
    assert bench.tokens("text") == alone(whole_model(family), asked.prompt_ids, [], asked.sampling.max_tokens)


def test_without_mlx_vlm_the_text_is_served_of_what_mlx_lm_can_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlx_vlm.utils", None)
    folder = write_vision_model(tmp_path / "mistral", "mistral3")
    assert load_model(EngineConfig(str(folder))).card.vision is None
    assert "engine.images_refused family=mistral3: a model with vision needs mlx-vlm" in caplog.text
    with pytest.raises(SetupError, match=r"needs mlx-vlm: pip install 'mlx-parallm\[vision\]'"):
        load_model(EngineConfig(str(write_vision_model(tmp_path / "small"))))


def test_gemma_3_sees_by_the_width_of_its_language_side_whose_embeddings_are_its_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_vision_model(tmp_path / "small", "gemma3")
    file, config = folder / "config.json", json.loads((folder / "config.json").read_text())
    from mlx_vlm.utils import load_model as load_whole

    theirs = load_whole(folder)
    del config["hidden_size"]  # without which mlx-vlm takes 2,048
    file.write_text(json.dumps(config))
    loaded = load_model(EngineConfig(str(folder)))
    assert not any("lm_head" in name for name, _ in loaded.model.named_modules())
    bench = Gaze(loaded)
    bench.ask("one", WHAT, [picture(1)])
    bench.run()
    bench.check(theirs)
    settings = folder / "preprocessor_config.json"
    for wrong, words in (
        ({"size": {"width": 64, "height": 64}}, "64 pixels do not fit a tower of 32"),
        ({"do_pan_and_scan": True}, "pan and scan"),
    ):
        settings.write_text(json.dumps(wrong))
        with pytest.raises(SetupError, match=words):
            load_model(EngineConfig(str(folder)))
    assert not is_vision({key: value for key, value in config.items() if key != "vision_config"})


def test_of_mistral_3_only_what_runs_in_the_batch_is_seen_with(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "small", "mistral3")
    file, config = folder / "config.json", json.loads((folder / "config.json").read_text())
    for text in ("ministral3", "mistral4"):
        assert not is_vision({**config, "text_config": {**config["text_config"], "model_type": text}})
    tied = {**config, "text_config": {**config["text_config"], "tie_word_embeddings": True}}
    file.write_text(json.dumps(tied))
    weights = mx.load(str(folder / "model.safetensors"))
    del weights["language_model.lm_head.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    from mlx_vlm.utils import load_model as load_whole

    bench = Gaze(load_model(EngineConfig(str(folder))))
    bench.ask("one", WHAT, [picture(1)])
    bench.run()
    bench.check(load_whole(folder))
    file.write_text(json.dumps({**tied, "vision_config": {**config["vision_config"], "image_size": 56}}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": 50}}))
    with pytest.raises(SetupError, match="50 pixels in squares of 16 do not fit a tower of 56"):
        load_model(EngineConfig(str(folder)))
    del tied["text_config"]["rope_theta"]
    file.write_text(json.dumps(tied))
    with pytest.raises(SetupError, match="no rope_theta"):
        load_model(EngineConfig(str(folder)))


@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma3n", "molmo"])
def test_a_model_whose_tower_we_do_not_run_says_at_start_that_it_refuses_images(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"model_type": kind, "text_config": {}, "vision_config": {"hidden_size": 8}}
    assert not is_vision(config)
    try:
        check_known(config)
    except SetupError as refusal:
        assert f"family {kind!r} are not supported" in str(refusal)
    else:
        assert f"engine.images_refused family={kind}" in caplog.text
    caplog.clear()
    check_known({"model_type": "llama"})
    assert not caplog.text
