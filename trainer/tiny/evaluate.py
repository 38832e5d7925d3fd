"""How many additions a model gets exactly right, decoded greedily."""

from collections import defaultdict
from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from mlx_lm.models import llama
from tokenizers import Tokenizer

from trainer.tiny.data import ArithmeticPrompt, Message
from trainer.tiny.tokenizer import TURN_END, render

_LONGEST_ANSWER = 4  # three digits and the end of the turn


def greedy_accuracy(model: llama.Model, tokenizer: Tokenizer, prompts: Sequence[ArithmeticPrompt]) -> float:
    """The share of prompts whose whole reply, with its end, is the right number."""
    by_length: dict[int, list[tuple[list[int], str]]] = defaultdict(list)
    for prompt in prompts:
        ids = tokenizer.encode(render([Message("user", prompt.question)])).ids
        by_length[len(ids)].append((ids, prompt.answer))
    end = tokenizer.token_to_id(TURN_END)
    right = 0
    for group in by_length.values():
        replies = _decode_greedily(model, [ids for ids, _ in group])
        right += sum(
            end in reply and tokenizer.decode(reply[: reply.index(end)]) == answer
            for reply, (_, answer) in zip(replies, group, strict=True)
        )
    return right / len(prompts)


def _decode_greedily(model: llama.Model, prompts: list[list[int]]) -> list[list[int]]:
    """Full forwards over prompts of one length: no cache, no padding, nothing to get wrong."""
    tokens_BT = mx.array(prompts)
    for _ in range(_LONGEST_ANSWER):
        next_B1 = mx.argmax(model(tokens_BT)[:, -1:], axis=-1)
        tokens_BT = mx.concatenate([tokens_BT, next_B1.astype(tokens_BT.dtype)], axis=1)
        mx.eval(tokens_BT)
    return cast(list[list[int]], tokens_BT[:, len(prompts[0]) :].tolist())
