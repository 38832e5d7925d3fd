"""Images in the batch: `python -m tests.bench.images [--shape small|500m|qwen] [--rows 8]`.

Rows with an image each, together over one at a time, in tokens per second from request to end; and first tokens of
short texts that come while rows with images do, over those of texts that come while as long rows of text do. The model
is a SmolVLM or a Qwen2.5-VL of random weights, nothing is kept between requests, and each row has an image of its own.
Runs alternate in one process.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from mlx_model import cuda_graphs
from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from shared.images.refs import VisionSpec
from shared.sequences import SamplingParams, SequenceSpec
from tests.engine.small_models import write_tokenizer
from tests.engine.vision_models import CONFIGS, MARKS, TEMPLATE, image_spec, picture, whole_model, write_vision_model
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest

SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "text": {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768},
        "seen": {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 512, "patch_size": 16},
        "scale": 2,
        "tile": 128,
    },
    "500m": {
        "text": {
            "hidden_size": 960, "num_hidden_layers": 32, "intermediate_size": 2560, "num_attention_heads": 15,
            "num_key_value_heads": 5, "vocab_size": 49_280,
        },
        "seen": {
            "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072, "num_attention_heads": 12,
            "patch_size": 16,
        },
        "scale": 4,
        "tile": 512,
    },
    "qwen": {
        "text": {
            "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768, "num_key_value_heads": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        },
        "seen": {
            "hidden_size": 128, "depth": 8, "intermediate_size": 512, "patch_size": 14, "out_hidden_size": 256,
            "window_size": 112, "fullatt_block_indexes": [3, 7],
        },
        "tile": 280,
    },
}  # fmt: skip
AIM_TOGETHER, AIM_BESIDE = 3.0, 1.5
TEXT_TOKENS, TEXTS = 8, 24
MANY = 64  # more than are at work at one time


def seeing_model(shape: dict[str, Any], dtype: str) -> LoadedModel:
    """A SmolVLM of such a size: an image of two by two tiles is five of them, with the whole; or a Qwen2.5-VL."""
    if "scale" not in shape:
        config = {**CONFIGS["qwen2_5_vl"], "max_position_embeddings": 8192, **shape["text"]}
        config["vision_config"] = {**config["vision_config"], **shape["seen"]}
        images = {"min_pixels": 56 * 56, "max_pixels": 1280 * 28 * 28}
        with tempfile.TemporaryDirectory() as name:
            write_vision_model(Path(name), "qwen2_5_vl", config=config, images=images)
            return load_model(EngineConfig(name, dtype=dtype))
    config = dict(CONFIGS["smolvlm"])
    config["text_config"] = {**config["text_config"], "max_position_embeddings": 8192, **shape["text"]}
    config["vision_config"] = {**config["vision_config"], "image_size": shape["tile"], **shape["seen"]}
    config |= {"scale_factor": shape["scale"], "vocab_size": config["text_config"]["vocab_size"]}
    seen = (shape["tile"] // shape["seen"]["patch_size"] // shape["scale"]) ** 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = {
            name: each.astype(getattr(mx, dtype))
            for name, each in tree_flatten(whole_model("smolvlm", 0, config).parameters())
        }
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        write_tokenizer(folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens(MARKS["smolvlm"])
        tokenizer.save(str(folder / "tokenizer.json"))
        edges = {"size": {"longest_edge": 2 * shape["tile"]}, "max_image_size": {"longest_edge": shape["tile"]}}
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        files = {
            "config.json": config,
            "tokenizer_config.json": {**settings, "chat_template": TEMPLATE.replace("MARK", "<image>")},
            "preprocessor_config.json": edges,
            "processor_config.json": {"image_seq_len": seen},
        }
        for file, content in files.items():
            (folder / file).write_text(json.dumps(content))
        return load_model(EngineConfig(str(folder), dtype=dtype))


def engine_of(loaded: LoadedModel, rows: int) -> Engine:
    """With nothing kept between requests."""
    config = EngineConfig("", max_rows=rows + 1, prefill_rows=rows, prefix_cache_bytes=0, image_cache_bytes=1)
    return Engine(loaded, config)


def looking(vision: VisionSpec, seed: int, tokens: int, side: int) -> RowRequest:
    """A row with an image of its own."""
    spec, sent = image_spec(
        f"image {seed}", vision, "What is this? <image> Say it.", [picture(seed, side, side)], max_tokens=tokens,
        ignore_eos=True,
    )  # fmt: skip
    return RowRequest(spec, pictures=sent)


def text(name: str, length: int, tokens: int) -> RowRequest:
    """A row of so many ids."""
    ids = tuple(3 + (7 * at + len(name)) % 250 for at in range(length))
    return RowRequest(SequenceSpec(name, "m", ids, SamplingParams(tokens, 0, temperature=0.0, ignore_eos=True)))


def speed(engine: Engine, requests: list[RowRequest], *, together: bool) -> float:
    """Tokens per second, from the first request to the last token."""
    began, tokens = time.perf_counter(), 0
    for part in [requests] if together else [[each] for each in requests]:
        engine.submit(part)
        while engine.busy:
            tokens += sum(len(event.tokens) for event in engine.turn().events)
    return tokens / (time.perf_counter() - began)


def first_tokens(engine: Engine, stream: Iterator[RowRequest], rows: int) -> float:
    """The median wait of short texts, one after another, while the stream keeps so many rows at work."""
    waits: list[float] = []
    working = rows
    engine.submit([next(stream) for _ in range(rows)])
    for number in range(TEXTS):
        began, waited = time.perf_counter(), 0.0
        engine.submit([text(f"text {number}", 12, TEXT_TOKENS)])
        over = False
        while not over:
            for event in engine.turn().events:
                mine = event.seq == f"text {number}"
                if mine and event.tokens and not waited:
                    waited = time.perf_counter() - began
                over |= mine and event.finish is not None
                working -= not mine and event.finish is not None
            if working < rows:
                engine.submit([next(stream) for _ in range(rows - working)])
                working = rows
        waits.append(waited)
    return median(waits)


def ratios(name: str, before: Callable[[], float], after: Callable[[], float], rounds: int, aim: str) -> None:
    """Of runs in turn, after over before."""
    before(), after()
    pairs = [(before(), after()) for _ in range(rounds)]
    each = [late / early for early, late in pairs]
    shown = " ".join(f"{ratio:.2f}" for ratio in each)
    values = median(early for early, _ in pairs), median(late for _, late in pairs)
    print(f"{name}: x {median(each):.2f} ({shown}; {values[0]:.4g} -> {values[1]:.4g}) {aim}", flush=True)


def main() -> None:
    """Both measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--rounds", type=int, default=3)
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    parser.add_argument("--dtype", default="float32" if on_cpu else "bfloat16")
    args = parser.parse_args()
    cuda_graphs.prepare()
    shape = SHAPES[args.shape]
    loaded, side = seeing_model(shape, args.dtype), 2 * shape["tile"]
    vision = loaded.card.vision
    assert vision is not None, "a model that sees"
    engine = engine_of(loaded, args.rows)
    one = looking(vision, 0, 1, side)
    length = len(one.spec.prompt_ids)
    print(f"{args.shape}: a prompt with an image is {length} ids, the image {len(one.pictures[0].tiles)} tiles")
    for tokens in args.tokens:
        asked = [looking(vision, seed, tokens, side) for seed in range(args.rows)]
        ratios(
            f"{args.rows} rows with images, {tokens} tokens each, together over one at a time, tok/s",
            lambda asked=asked: speed(engine, asked, together=False),  # type: ignore[misc]
            lambda asked=asked: speed(engine, asked, together=True),  # type: ignore[misc]
            args.rounds,
            f"aim {AIM_TOGETHER}",
        )

    beside = [looking(vision, seed, 32, side) for seed in range(MANY)]
    long = [text(f"long {seed}", length, 32) for seed in range(MANY)]
    ratios(
        "first tokens of short texts beside rows with images over beside rows of text, s",
        lambda: first_tokens(engine_of(loaded, args.rows), cycle(long), args.rows // 2),
        lambda: first_tokens(engine_of(loaded, args.rows), cycle(beside), args.rows // 2),
        args.rounds,
        f"aim {AIM_BESIDE}",
    )


if __name__ == "__main__":
    main()
