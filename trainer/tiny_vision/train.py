"""Train the tiny vision model from scratch: `python -m trainer.tiny_vision.train --out models/tiny-vision`.

It needs mlx-vlm (`pip install 'mlx-parallm[vision]'`), whose SmolVLM it is, and a GPU, or hours.
"""

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mlx_model import fast_blas
from trainer.tiny_vision.data import COLOURS, QUESTIONS, SHAPES, TASKS, Task, example

TILE, PATCH, MERGE = 48, 6, 2
TILE_TOKENS = (TILE // PATCH // MERGE) ** 2
FAKE, IMAGE, WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"
START, END, PAD, OVER = "<|im_start|>", "<|im_end|>", "<|pad|>", "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_BEFORE = f"{START}user\n{FAKE}{WHOLE}"
RESAMPLE = 1  # Lanczos, as in the folder's image processor
EXAMPLES = 8  # of each task, in the model's folder
AHEAD = 4  # batches that a drawing process has ready


def new_tokenizer() -> Tokenizer:
    """Byte-level, with the words of the questions and answers, and single digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    words = [text for texts in QUESTIONS.values() for text in texts] + [*COLOURS, *SHAPES, "user\n", "assistant\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[OVER, START, END, PAD, IMAGE, FAKE, WHOLE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(words * 3, trainer)
    return tokenizer


def configuration(tokenizer: Tokenizer) -> dict[str, Any]:
    """Content of the model's config.json."""
    ids = {name: tokenizer.token_to_id(name) for name in (IMAGE, END, PAD)}
    return {
        "model_type": "smolvlm",
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": ids[IMAGE],
        "scale_factor": MERGE,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
        "text_config": {
            "model_type": "llama",
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "intermediate_size": 384,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": 2048,
        },
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": 96,
            "num_hidden_layers": 3,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "image_size": TILE,
            "patch_size": PATCH,
        },
    }


def new_model(config: dict[str, Any], seed: int) -> Any:
    """mlx-vlm's SmolVLM with random weights."""
    from mlx_vlm.models import smolvlm

    mx.random.seed(seed)
    parts = {
        "text_config": smolvlm.TextConfig.from_dict(config["text_config"]),
        "vision_config": smolvlm.VisionConfig.from_dict(config["vision_config"]),
    }
    model = smolvlm.Model(smolvlm.ModelConfig.from_dict({**config, **config["text_config"], **parts, **_top(config)}))
    mx.eval(model.parameters())
    return model


def _top(config: dict[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in ("model_type", "image_token_id", "scale_factor", "vocab_size")}


class Drawn(NamedTuple):
    """Pictures as a worker would see them, with their questions and answers."""

    pixels_BSSC: np.ndarray[Any, np.dtype[np.uint8]]
    questions: list[str]
    answers: list[str]


def drawn(rows: int, seed: int | str, task: Task | None = None) -> Drawn:
    """So many examples of a seed."""
    rng = random.Random(seed)
    examples = [example(rng, task) for _ in range(rows)]
    pixels = [np.asarray(each.picture.resize((TILE, TILE), RESAMPLE)) for each in examples]
    return Drawn(np.stack(pixels), [each.question for each in examples], [each.answer for each in examples])


class PictureBatch:
    """Pictures and texts of one length, padded on the right."""

    def __init__(self, tokenizer: Tokenizer, examples: Drawn) -> None:
        self.pixels_BSSC = mx.array((examples.pixels_BSSC.astype(np.float32) / 255 - 0.5) / 0.5)
        asked = [
            tokenizer.encode(f"{FAKE}{each}{END}\n{START}assistant\n", add_special_tokens=False).ids
            for each in examples.questions
        ]
        said = [tokenizer.encode(each + END, add_special_tokens=False).ids for each in examples.answers]
        width = -(-max(len(one) + len(two) for one, two in zip(asked, said, strict=True)) // 8) * 8
        ids = np.full((len(asked), width), tokenizer.token_to_id(PAD), np.int32)
        mask = np.zeros((len(asked), width), np.float32)
        for row, (one, two) in enumerate(zip(asked, said, strict=True)):
            ids[row, : len(one) + len(two)] = one + two
            mask[row, len(one) : len(one) + len(two)] = 1
        self.behind_BT, self.mask_BT = mx.array(ids), mx.array(mask)
        self.before_T = mx.array(tokenizer.encode(_BEFORE, add_special_tokens=False).ids)


def logits_of(model: Any, before_T: mx.array, pixels_BSSC: mx.array, behind_BT: mx.array) -> mx.array:
    """[B, T, V] of what follows each id of `behind_BT`, but for the last, the first of them included."""
    seen_BPD, *_ = model.vision_model(pixels_BSSC, output_hidden_states=True)
    seen_BMH = model.connector(seen_BPD)
    words, rows = model.language_model.embed_tokens, pixels_BSSC.shape[0]
    before_BTH = mx.broadcast_to(words(before_T), (rows, before_T.size, seen_BMH.shape[-1]))
    embedded_BTH = mx.concatenate([before_BTH, seen_BMH, words(behind_BT[:, :-1])], axis=1)
    logits_BTV: mx.array = model.language_model(None, inputs_embeds=embedded_BTH).logits
    return logits_BTV[:, -behind_BT.shape[1] :]


def loss_of(model: Any, before_T: mx.array, pixels_BSSC: mx.array, behind_BT: mx.array, mask_BT: mx.array) -> mx.array:
    """Mean cross-entropy of the answers' tokens."""
    losses_BT = nn.losses.cross_entropy(logits_of(model, before_T, pixels_BSSC, behind_BT), behind_BT)
    mean: mx.array = (losses_BT * mask_BT).sum() / mask_BT.sum()
    return mean


def accuracy(model: Any, tokenizer: Tokenizer, task: Task, count: int) -> float:
    """Share of answers that greedy decoding gets right, on pictures that training has not drawn."""
    right = 0
    for first in range(0, count, 64):
        batch = PictureBatch(tokenizer, drawn(64, f"held out {task} {first}", task))
        logits_BTV = logits_of(model, batch.before_T, batch.pixels_BSSC, batch.behind_BT)
        hits_BT = (mx.argmax(logits_BTV, axis=-1) == batch.behind_BT) | (batch.mask_BT == 0)
        right += sum(bool(hit) for hit in np.asarray(mx.all(hits_BT, axis=-1)))
    return right / (-(-count // 64) * 64)


def batches(steps: int, rows: int, seed: int, workers: int) -> Iterator[Drawn]:
    """One for each step, drawn in processes of their own: a GPU learns faster than one core draws."""
    seeds = [(rows, seed * 1_000_003 + step) for step in range(steps)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        waiting = [pool.apply_async(drawn, each) for each in seeds[: workers * AHEAD]]
        for step in range(steps):
            yield waiting[step].get()
            if len(waiting) < steps:
                waiting.append(pool.apply_async(drawn, seeds[len(waiting)]))


def train(model: Any, tokenizer: Tokenizer, examples: Iterator[Drawn], *, steps: int, rate: float) -> None:
    """A step for each of the batches; prints loss and accuracy on the way."""
    warmup = max(1, min(100, steps // 10))
    schedule = optim.join_schedules(
        [optim.linear_schedule(0.0, rate, warmup), optim.cosine_decay(rate, max(1, steps - warmup))], [warmup]
    )
    optimizer = optim.AdamW(learning_rate=schedule, betas=[0.9, 0.98], weight_decay=0.01)
    gradients_of = nn.value_and_grad(model, loss_of)
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def update(before_T: mx.array, pixels_BSSC: mx.array, behind_BT: mx.array, mask_BT: mx.array) -> mx.array:
        loss: mx.array
        loss, gradients = gradients_of(model, before_T, pixels_BSSC, behind_BT, mask_BT)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        return loss

    began, losses = time.perf_counter(), list[float]()
    for step, each in enumerate(examples, 1):
        batch = PictureBatch(tokenizer, each)
        loss = update(batch.before_T, batch.pixels_BSSC, batch.behind_BT, batch.mask_BT)
        mx.eval(loss, state)
        losses.append(float(np.asarray(loss)))
        if step % 250 == 0 or step == steps:
            shares = "  ".join(f"{task} {accuracy(model, tokenizer, task, 128):.2f}" for task in TASKS)
            mean = sum(losses[-50:]) / len(losses[-50:])
            print(f"step {step}  {time.perf_counter() - began:.0f} s  loss {mean:.4f}  {shares}", flush=True)


def save(model: Any, tokenizer: Tokenizer, config: dict[str, Any], folder: Path) -> None:
    """Write the folder, in fp16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: array.astype(mx.float16) for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer.save(str(folder / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
        "preprocessor_config.json": {
            "image_processor_type": "SmolVLMImageProcessor",
            "do_image_splitting": False,
            "size": {"longest_edge": TILE},
            "max_image_size": {"longest_edge": TILE},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": RESAMPLE,
        },
        "processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": TILE_TOKENS},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def save_examples(folder: Path) -> None:
    """Write pictures that training has not drawn, with questions and right answers: `EXAMPLES` of each task."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for task in TASKS:
        rng = random.Random(f"examples {task}")
        for number in range(1, EXAMPLES + 1):
            each, name = example(rng, task), f"{task}-{number}.png"
            each.picture.save(folder / name)
            lines.append(json.dumps({"picture": name, "question": each.question, "reference": each.answer}) + "\n")
    (folder / "questions.jsonl").write_text("".join(lines))


def main() -> None:
    """Train, measure, write the folder."""
    parser = argparse.ArgumentParser(prog="python -m trainer.tiny_vision.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models/tiny-vision"), help="folder to write")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--bs", type=int, default=128, help="pictures in a batch")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes that draw pictures")
    arguments = parser.parse_args()
    fast_blas.install()
    tokenizer = new_tokenizer()
    config = configuration(tokenizer)
    model = new_model(config, arguments.seed)
    count = sum(array.size for _, array in tree_flatten(model.parameters()))
    print(f"{count:,} parameters, vocabulary of {tokenizer.get_vocab_size()}", flush=True)
    examples = batches(arguments.steps, arguments.bs, arguments.seed, arguments.workers)
    train(model, tokenizer, examples, steps=arguments.steps, rate=arguments.lr)
    for task in TASKS:
        print(f"{task}: {accuracy(model, tokenizer, task, 1024):.3f} of 1,024 held-out pictures", flush=True)
    save(model, tokenizer, config, arguments.out)
    save_examples(arguments.out / "examples")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
