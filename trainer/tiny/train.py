"""Train the tiny model from scratch: `python -m trainer.tiny.train --out models/tiny`.

A few minutes on one CPU core. It stops at a fixed number of steps, well before it can add reliably: what is
left to learn is what the reinforcement-learning demo teaches it.
"""

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.models import llama
from tokenizers import Tokenizer

from mlx_model import fast_blas
from trainer.tiny.data import ChatExample, arithmetic_prompts, sample_addition, sample_talk
from trainer.tiny.evaluate import greedy_accuracy
from trainer.tiny.model import new_model, parameter_count, save_model
from trainer.tiny.tokenizer import PAD, TURN_END, build_tokenizer, render

fast_blas.install()

_TALK_SHARE_FIRST, _TALK_SHARE_THEN = 0.7, 0.25  # of the batches, in each half of the training
_LENGTH_STEP = 8  # batch lengths are multiples of it, so that few shapes get compiled
_WARMUP_STEPS = 100
_EVALUATE_EVERY = 80
_HELD_OUT_SEED = 7


class Arguments(argparse.Namespace):
    """Arguments of the command line."""

    out: Path
    steps: int
    bs: int
    lr: float
    seed: int
    eval_prompts: int


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Right-padded token ids, and 1.0 where a token belongs to a reply."""

    tokens: mx.array  # [B, T]
    reply_mask: mx.array  # [B, T]


TrainStep = Callable[[PaddedBatch], float]  # gives the loss


def main() -> None:
    """Train, report accuracy on held-out pairs, write the model folder."""
    arguments = _parse_arguments()
    tokenizer = build_tokenizer(arguments.seed)
    model = new_model(tokenizer, arguments.seed)
    print(f"{parameter_count(model):,} parameters, vocabulary of {tokenizer.get_vocab_size()}", flush=True)
    train(model, tokenizer, arguments)
    save_model(model, tokenizer, arguments.out)
    print(f"wrote {arguments.out}")


def train(model: llama.Model, tokenizer: Tokenizer, arguments: Arguments) -> None:
    """Run all train steps, printing loss and held-out accuracy on the way."""
    rng = random.Random(arguments.seed)
    train_step = _compile_train_step(model, arguments)
    held_out = arithmetic_prompts(arguments.eval_prompts, _HELD_OUT_SEED, split="held_out")
    started = time.perf_counter()
    losses: list[float] = []
    for step in range(1, arguments.steps + 1):
        talk_share = _TALK_SHARE_FIRST if step <= arguments.steps // 2 else _TALK_SHARE_THEN
        batch = draw_batch(rng, tokenizer, arguments.bs, talk_share)
        losses.append(train_step(batch))
        if step % _EVALUATE_EVERY == 0 or step == arguments.steps:
            recent = losses[-50:]
            accuracy = greedy_accuracy(model, tokenizer, held_out)
            print(
                f"step {step}  {time.perf_counter() - started:.0f} s  loss {sum(recent) / len(recent):.4f}"
                f"  held-out exact {accuracy:.3f}",
                flush=True,
            )


def draw_batch(rng: random.Random, tokenizer: Tokenizer, batch_size: int, talk_share: float) -> PaddedBatch:
    """One batch of additions, or a smaller one of talk, whose replies are longer."""
    if rng.random() < talk_share:
        chats = [sample_talk(rng) for _ in range(batch_size // 3)]
    else:
        chats = [sample_addition(rng) for _ in range(batch_size)]
    return _encode_batch(tokenizer, chats)


def _encode_batch(tokenizer: Tokenizer, chats: list[ChatExample]) -> PaddedBatch:
    prompts = [encoding.ids for encoding in tokenizer.encode_batch([render(chat.messages) for chat in chats])]
    replies = [encoding.ids for encoding in tokenizer.encode_batch([chat.reply + TURN_END for chat in chats])]
    longest = max(len(prompt) + len(reply) for prompt, reply in zip(prompts, replies, strict=True))
    width = math.ceil(longest / _LENGTH_STEP) * _LENGTH_STEP
    tokens_BT = np.full((len(chats), width), tokenizer.token_to_id(PAD), np.int32)
    reply_mask_BT = np.zeros((len(chats), width), np.float32)
    for row, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        end = len(prompt) + len(reply)
        tokens_BT[row, :end] = prompt + reply
        reply_mask_BT[row, len(prompt) : end] = 1.0
    return PaddedBatch(mx.array(tokens_BT), mx.array(reply_mask_BT))


def _compile_train_step(model: llama.Model, arguments: Arguments) -> TrainStep:
    warmup = optim.linear_schedule(0.0, arguments.lr, _WARMUP_STEPS)
    decay = optim.cosine_decay(arguments.lr, max(1, arguments.steps - _WARMUP_STEPS))
    optimizer = optim.AdamW(
        learning_rate=optim.join_schedules([warmup, decay], [_WARMUP_STEPS]),
        betas=[0.9, 0.98],
        weight_decay=0.01,
    )
    loss_and_gradients = nn.value_and_grad(model, _reply_loss)
    state = [model.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def update(tokens_BT: mx.array, reply_mask_BT: mx.array) -> mx.array:
        loss: mx.array
        loss, gradients = loss_and_gradients(model, tokens_BT, reply_mask_BT)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        return loss

    def train_step(batch: PaddedBatch) -> float:
        loss = update(batch.tokens, batch.reply_mask)
        mx.eval(loss, state)
        return float(loss)

    return train_step


def _reply_loss(model: llama.Model, tokens_BT: mx.array, reply_mask_BT: mx.array) -> mx.array:
    """Mean cross-entropy of the reply tokens.

    Padding stands on the right, where causal attention cannot see it.
    """
    losses_BT: mx.array = nn.losses.cross_entropy(model(tokens_BT[:, :-1]), tokens_BT[:, 1:])
    mask_BT = reply_mask_BT[:, 1:]
    return (losses_BT * mask_BT).sum() / mask_BT.sum()


def _parse_arguments() -> Arguments:
    parser = argparse.ArgumentParser(prog="python -m trainer.tiny.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models/tiny"), help="folder to write")
    parser.add_argument("--steps", type=int, default=720)
    parser.add_argument("--bs", type=int, default=96, help="additions in a batch")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-prompts", type=int, default=500, help="held-out additions to measure on")
    return parser.parse_args(namespace=Arguments())


if __name__ == "__main__":
    main()
