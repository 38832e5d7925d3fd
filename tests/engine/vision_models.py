"""Small vision models with random weights, pictures for them, and what mlx-vlm alone says of both."""

import hashlib
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
import msgspec
import numpy as np
from mlx.utils import tree_flatten, tree_map
from PIL import Image
from tokenizers import Tokenizer

from shared.image_files.pixels import tiles
from shared.images.layout import layout
from shared.images.refs import Detail, ImageRef, VisionSpec, image_key
from shared.sequences import SequenceSpec
from tests.engine.conftest import spec
from tests.engine.small_models import EOS, write_tokenizer
from worker.engine.messages import Picture

TILE, LONGEST = 32, 64
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
MARKS += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
IMAGE_TOKEN_ID = EOS + 1
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
CONFIG: dict[str, Any] = {
    "model_type": "smolvlm",
    "image_token_id": IMAGE_TOKEN_ID,
    "scale_factor": 2,
    "vocab_size": 320,
    "eos_token_id": EOS,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 320,
        "max_position_embeddings": 1024,
    },
    "vision_config": {
        "model_type": "smolvlm_vision",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "image_size": TILE,
        "patch_size": 8,
    },
}


def whole_model(config: dict[str, Any], seed: int = 0) -> Any:
    """mlx-vlm's model with random weights, sharpened so that what it sees changes what it says."""
    from mlx_vlm.models import smolvlm

    mx.random.seed(seed)
    parts = {name: dict(config[name]) for name in ("text_config", "vision_config")}
    model = smolvlm.Model(
        smolvlm.ModelConfig.from_dict(config)
        if not parts
        else smolvlm.ModelConfig(
            **{
                **{name: value for name, value in config.items() if name not in parts},
                "text_config": smolvlm.TextConfig.from_dict(parts["text_config"]),
                "vision_config": smolvlm.VisionConfig.from_dict(parts["vision_config"]),
            }
        )
    )
    model.update(tree_map(lambda array: array * 2 if array.ndim > 1 else array, model.parameters()))
    return model


def write_vision_model(folder: Path, *, seed: int = 0, bits: int = 0) -> Path:
    """A folder as a checkpoint has it."""
    folder.mkdir(parents=True, exist_ok=True)
    model, config = whole_model(CONFIG, seed), CONFIG
    if bits:
        mlx.nn.quantize(model.language_model, group_size=32, bits=bits)
        config = {**CONFIG, "quantization": {"group_size": 32, "bits": bits}}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    files = {
        "config.json": config,
        "tokenizer_config.json": {**settings, "chat_template": TEMPLATE},
        "preprocessor_config.json": {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": LONGEST},
            "max_image_size": {"longest_edge": TILE},
        },
        "processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Large spots of random colours."""
    spots = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(spots).resize((width, height), Image.Resampling.NEAREST)


def png(image: Image.Image) -> bytes:
    """Its file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def image_spec(
    seq: str, vision: VisionSpec, text: str, pictures: list[Image.Image], detail: Detail = "high", **sampling: object
) -> tuple[SequenceSpec, tuple[Picture, ...]]:
    """A sequence whose prompt is this text, with a picture for each `<image>`; and what comes with it."""
    assert text.count("<image>") == len(pictures)
    refs, sent = [], []
    first, *others = text.split("<image>")
    for image, behind in zip(pictures, others, strict=True):
        data, cut = png(image), layout(vision, *image.size, detail)
        digest = hashlib.sha256(data).digest()
        key = image_key(digest, detail, vision)
        refs.append(ImageRef(digest, key, cut.tokens, detail))
        sent.append(Picture(key, tiles(data, vision, detail)))
        first += cut.text + behind
    ids = codec().encode(first).ids
    images = {"images": tuple(refs), "image_token": IMAGE_TOKEN_ID} if refs else {}
    return msgspec.structs.replace(spec(seq, ids, **sampling), **images), tuple(sent)


@cache
def codec() -> Tokenizer:
    """The tokenizer that `write_vision_model` writes."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.add_special_tokens(MARKS)
    return tokenizer


def alone(model: Any, prompt_ids: tuple[int, ...], pictures: list[Image.Image], tokens: int) -> list[int]:
    """Greedy tokens of mlx-vlm's model, fed with transformers' pixels, without a cache."""
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    seen: dict[str, Any] = {"pixel_values": None}
    if pictures:
        processor = SmolVLMImageProcessorPil(size={"longest_edge": LONGEST}, max_image_size={"longest_edge": TILE})
        pixels = processor([pictures])
        seen = {name: mx.array(np.array(pixels[name])) for name in ("pixel_values", "pixel_attention_mask")}
    said: list[int] = []
    embedded_1LH = model.get_input_embeddings(mx.array([prompt_ids]), **seen).inputs_embeds
    for _ in range(tokens):
        logits_1LV = model.language_model(None, inputs_embeds=embedded_1LH).logits
        said.append(int(mx.argmax(logits_1LV[0, -1]).item()))
        next_1LH = model.language_model.embed_tokens(mx.array([said[-1:]]))
        embedded_1LH = mx.concatenate([embedded_1LH, next_1LH], axis=1)
    return said
