"""Small vision models with random weights, pictures for them, and what mlx-vlm alone says of both."""

import hashlib
import io
import json
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
import msgspec
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import KVCache
from PIL import Image
from tokenizers import Tokenizer

from mlx_model.vision.features import embeddings
from mlx_model.vision.language import row_positions_of
from mlx_model.vision.qwen import CLIP_MEAN, CLIP_STD
from shared.image_files.pixels import tiles
from shared.images.layout import layout
from shared.images.refs import Detail, ImageRef, Picture, VisionSpec, image_key
from shared.sequences import SequenceSpec
from tests.engine.conftest import spec
from tests.engine.small_models import EOS, write_tokenizer

TILE, LONGEST = 32, 64
MARKS = {
    "smolvlm": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    + [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)],
    "pixtral": ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "<end_of_utterance>"],
}
MARKS["mistral3"] = MARKS["pixtral"]
MARKS["qwen2_5_vl"] = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<end_of_utterance>"]
MARKS["qwen3_vl"] = MARKS["qwen3_vl_moe"] = MARKS["qwen2_5_vl"]
MARKS["lfm2_vl"] = ["<image>", "<|image_start|>", "<|img_thumbnail|>", "<|image_end|>", "<end_of_utterance>"] + [
    f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)
]
MARKS["gemma3"] = ["<image_soft_token>", "<start_of_image>", "<end_of_image>", "<end_of_utterance>"]
MARKED_AS = {"gemma3": "gemma3", "lfm2": "lfm2_vl", "idefics3": "smolvlm", "pixtral": "pixtral", "qwen": "qwen2_5_vl"}
IMAGE_TOKEN_ID = EOS + 1
WHAT = "What is this? <image> Say it."
LFM2_IMAGES = {"tile_size": TILE, "encoder_patch_size": 8, "min_image_tokens": 2, "max_image_tokens": 4}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}MARK{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
}
_SEEN = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 2, "patch_size": 8}
_BOTH = {"image_token_id": IMAGE_TOKEN_ID, "vocab_size": 320, "eos_token_id": EOS}
CONFIGS: dict[str, dict[str, Any]] = {
    "smolvlm": {
        "model_type": "smolvlm",
        "scale_factor": 2,
        **_BOTH,
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "smolvlm_vision", "image_size": TILE, **_SEEN},
    },
    "pixtral": {
        "model_type": "pixtral",
        **_BOTH,
        "text_config": {"model_type": "mistral", "head_dim": 16, "rope_theta": 10_000.0, **_TEXT},
        "vision_config": {"model_type": "pixtral", "image_size": LONGEST, "head_dim": 16, **_SEEN},
    },
}
_QWEN = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 64,
}
_QWEN_IDS = {**_BOTH, "vision_start_token_id": IMAGE_TOKEN_ID + 1, "vision_end_token_id": IMAGE_TOKEN_ID + 2}
CONFIGS["qwen2_5_vl"] = {
    "model_type": "qwen2_5_vl",
    **_TEXT,
    **_QWEN_IDS,
    "rope_theta": 30.0,  # so low that rows and columns tell within a few of them
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "qwen2_5_vl", "window_size": 32, "fullatt_block_indexes": [1], **_QWEN},
}
CONFIGS["qwen3_vl"] = {
    "model_type": "qwen3_vl",
    **_QWEN_IDS,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "head_dim": 16,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        **_TEXT,
    },
    "vision_config": {"model_type": "qwen3_vl", "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    | _QWEN,
}
CONFIGS["qwen3_vl_moe"] = CONFIGS["qwen3_vl"] | {
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **CONFIGS["qwen3_vl"]["text_config"],
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
    },
    "vision_config": CONFIGS["qwen3_vl"]["vision_config"] | {"model_type": "qwen3_vl_moe"},
}
CONFIGS["gemma3"] = {
    "model_type": "gemma3",
    "image_token_index": IMAGE_TOKEN_ID,
    "vocab_size": 320,
    "hidden_size": 64,  # mlx-vlm scales the images' vectors by it
    "eos_token_id": EOS,
    "text_config": _TEXT
    | {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 16,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "mm_tokens_per_image": 4,
    },
    "vision_config": {"model_type": "siglip_vision_model", "image_size": TILE, **_SEEN},
}
CONFIGS["lfm2_vl"] = {
    "model_type": "lfm2_vl",
    **_BOTH,
    "downsample_factor": 2,
    "projector_hidden_size": 48,
    "text_config": _TEXT
    | {
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
    },
    "vision_config": {"model_type": "siglip2_vision_model", "num_patches": 16, **_SEEN},
}
CONFIGS["mistral3"] = {**CONFIGS["pixtral"], "model_type": "mistral3", "spatial_merge_size": 2}


def whole_model(family: str, seed: int = 0, config: dict[str, Any] | None = None) -> Any:
    """mlx-vlm's model with random weights, sharpened so that what it sees changes what it says."""
    module, config = import_module(f"mlx_vlm.models.{family}"), config or CONFIGS[family]
    mx.random.seed(seed)
    parts = {
        "text_config": module.TextConfig.from_dict(config.get("text_config") or config),
        "vision_config": module.VisionConfig.from_dict(config["vision_config"]),
    }
    names = module.ModelConfig.__dataclass_fields__
    whole = {name: value for name, value in config.items() if name in names or family == "smolvlm"}
    model = module.Model(module.ModelConfig(**{**whole, **parts}))
    model.update(tree_map(lambda array: array * 2 if array.ndim > 1 else array, model.parameters()))
    if family == "gemma3":
        side = model.language_model
        side.lm_head.weight = side.model.embed_tokens.weight  # as mlx-vlm loads it
        for layer in side.layers:  # or it says again what it has read
            layer.post_attention_layernorm.weight *= 8
            layer.post_feedforward_layernorm.weight *= 8
        model.multi_modal_projector.mm_input_projection_weight *= mx.random.normal((32, 64)) * 4
    if family == "lfm2_vl":
        model.multi_modal_projector.linear_2.weight *= 8  # or what it sees is lost among its words
    return model


def write_vision_model(
    folder: Path,
    family: str = "smolvlm",
    *,
    seed: int = 0,
    bits: int = 0,
    config: dict[str, Any] | None = None,
    images: dict[str, Any] | None = None,
) -> Path:
    """A folder as a checkpoint has it; `images`: of the image processor, in place of what a small model has."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config or CONFIGS[family]
    model = whole_model(family, seed, config)
    if bits:
        mlx.nn.quantize(model.language_model, group_size=32, bits=bits)
        config = {**config, "quantization": {"group_size": 32, "bits": bits}}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKS[family])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    small: dict[str, Any] = {"size": {"longest_edge": LONGEST}}
    if family == "smolvlm":
        small["max_image_size"] = {"longest_edge": TILE}
    if family.startswith("qwen"):
        small = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": LONGEST**2}}
    if family == "gemma3":
        small = {"size": {"width": TILE, "height": TILE}}
    if family == "lfm2_vl":
        small = {"do_image_splitting": False, **LFM2_IMAGES}
    files = {
        "config.json": config,
        "tokenizer_config.json": {
            **settings,
            "chat_template": TEMPLATE.replace("MARK", _mark(family)),
        },
        "preprocessor_config.json": images or small,
        "processor_config.json": {"image_seq_len": 4} if family == "smolvlm" else {},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def _mark(family: str) -> str:
    """What a chat template writes for an image."""
    mark = MARKS[family][family == "gemma3"]
    return f"<|vision_start|>{mark}<|vision_end|>" if family.startswith("qwen") else mark


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
        width, height, seen = tiles(data, vision, detail)
        sent.append(Picture(key, seen, width, height))
        first += (f"<|vision_start|>{cut.text}<|vision_end|>" if vision.family == "qwen" else cut.text) + behind
    ids = codec(MARKED_AS[vision.family]).encode(first).ids
    images = {"images": tuple(refs), "image_token": IMAGE_TOKEN_ID} if refs else {}
    return msgspec.structs.replace(spec(seq, ids, **sampling), **images), tuple(sent)


@cache
def codec(family: str = "smolvlm") -> Tokenizer:
    """The tokenizer that `write_vision_model` writes."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.add_special_tokens(MARKS[family])
    return tokenizer


def alone(model: Any, prompt_ids: tuple[int, ...], pictures: list[Image.Image], tokens: int) -> list[int]:
    """Greedy tokens of mlx-vlm's model with its own cache, fed with its own or transformers' pixels."""
    said: list[int] = []
    if model.config.model_type.startswith("qwen"):
        return _alone_on_axes(model, prompt_ids, pictures, tokens)
    side, ids_1L = model.language_model, mx.array([prompt_ids])
    fed_1LH = getattr(side, "model", side).embed_tokens(ids_1L)
    if pictures:
        fed_1LH = model.get_input_embeddings(ids_1L, **pixels(model, pictures)).inputs_embeds
    cache = side.make_cache() if hasattr(side, "make_cache") else [KVCache() for _ in side.layers]
    logits_1LV = side(ids_1L, inputs_embeds=fed_1LH, cache=cache).logits
    while True:
        said.append(int(mx.argmax(logits_1LV[0, -1]).item()))
        if len(said) == tokens:
            return said
        logits_1LV = side(mx.array([said[-1:]]), cache=cache).logits


def behind(model: Any, theirs: Any, prompt_ids: tuple[int, ...], pictures: list[Image.Image], said: list[int]) -> Any:
    """Logits [L, V] for each of the tokens said, of a language side fed with what mlx-vlm's model makes of the rest."""
    seen = theirs.get_input_embeddings(mx.array([prompt_ids]), **pixels(theirs, pictures))
    told_1LH = embeddings(model)(mx.array([said[:-1]]))
    fed_1LH, row_positions = mx.concatenate([seen.inputs_embeds, told_1LH], axis=1), row_positions_of(model)
    if row_positions is None:
        return model(None, input_embeddings=fed_1LH)[0, -len(said) :]
    first = len(prompt_ids) + int(seen.rope_deltas.item())
    later_31L = mx.broadcast_to(mx.arange(first, first + len(said) - 1), (3, 1, len(said) - 1))
    places = mx.array([at for at, each in enumerate(prompt_ids) if each == IMAGE_TOKEN_ID])
    deep = [mx.zeros_like(fed_1LH).at[0, places].add(each) for each in seen.deepstack_visual_embeds or ()]
    with row_positions.spread(mx.concatenate([seen.position_ids, later_31L], axis=2), deep):
        return model(None, input_embeddings=fed_1LH)[0, -len(said) :]


def _alone_on_axes(model: Any, prompt_ids: tuple[int, ...], pictures: list[Image.Image], tokens: int) -> list[int]:
    """With mlx-vlm's cache, which is how it goes on behind an image."""
    side, said = model.language_model, list[int]()
    side._rope_deltas = side._position_ids = None
    cache = [KVCache() for _ in side.layers]
    mx.disable_compile()  # on a CPU it takes seconds
    logits_1LV = model(mx.array([prompt_ids]), cache=cache, **(pixels(model, pictures) if pictures else {})).logits
    while True:
        said.append(int(mx.argmax(logits_1LV[0, -1]).item()))
        if len(said) == tokens:
            mx.enable_compile()
            return said
        logits_1LV = side(mx.array([said[-1:]]), cache=cache).logits


def pixels(model: Any, pictures: list[Image.Image]) -> dict[str, Any]:
    """What mlx-vlm is fed with: its own pixels, or transformers'."""
    if model.config.model_type in ("pixtral", "mistral3"):
        from mlx_vlm.models.pixtral.image_processing_pixtral import PixtralImageProcessor

        side = 8 * getattr(model.config, "spatial_merge_size", 1)
        seen = PixtralImageProcessor({"longest_edge": LONGEST}, {"height": side, "width": side})(pictures)
        return {"pixel_values": mx.array(seen["pixel_values"]), "image_sizes": seen["image_sizes"]}
    if model.config.model_type.startswith("qwen"):
        from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor

        mean, std = (CLIP_MEAN, CLIP_STD) if model.config.model_type == "qwen2_5_vl" else ((0.5,) * 3, (0.5,) * 3)
        seen = Qwen3VLImageProcessor(8, 2, 2, 256, LONGEST**2, image_mean=list(mean), image_std=list(std))(pictures)
        return {name: mx.array(values) for name, values in seen.items()}
    if model.config.model_type == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        seen = Gemma3ImageProcessorPil(size={"width": TILE, "height": TILE})(pictures)
        return {"pixel_values": mx.array(np.stack(seen["pixel_values"])), "mask": mx.ones((1, 1))}
    if model.config.model_type == "lfm2_vl":
        from mlx_vlm.models.lfm2_vl.processing_lfm2_vl import Lfm2VlNumpyImageProcessor

        seen = Lfm2VlNumpyImageProcessor(**LFM2_IMAGES)(pictures)
        return {name: mx.array(seen[name]) for name in ("pixel_values", "pixel_attention_mask", "spatial_shapes")}
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    seen = SmolVLMImageProcessorPil(size={"longest_edge": LONGEST}, max_image_size={"longest_edge": TILE})([pictures])
    return {name: mx.array(np.array(seen[name])) for name in ("pixel_values", "pixel_attention_mask")}
