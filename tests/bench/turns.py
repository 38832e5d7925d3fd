"""A conversation's second turn: `python -m tests.bench.turns [--rounds 3] [--kind NAME | --qwen3 4b]`.

Time to the second turn's first token over that of a prompt of the same length that nobody has read, for models whose
layers keep what they have read in different ways: random weights, so large that feeding the prompt is what takes time.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
import random
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel
from shared.sequences import SamplingParams, SequenceSpec
from tests.bench.adapters import SHAPES, in_memory, random_model
from worker.engine.engine import Engine
from worker.engine.messages import RowRequest

PROMPT, ANSWER, QUESTION, AIM = 2048, 32, 30, 0.12
VOCAB = 4096
SHAPE = {"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
KINDS: dict[str, dict[str, Any]] = {
    "dense": HEADS | {"model_type": "qwen3", "head_dim": 32, "rope_theta": 1e6, "tie_word_embeddings": True},
    "window": HEADS
    | {"model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 512}
    | {"sliding_window_pattern": 6},
    "recurrent": HEADS
    | {"model_type": "lfm2", "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 256}
    | {"block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False}
    | {"full_attn_idxs": [2, 5]},
    "linear attention": HEADS
    | {"model_type": "qwen3_next", "head_dim": 32, "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    | {"linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    | {"shared_expert_intermediate_size": 256, "mlp_only_layers": [], "moe_intermediate_size": 256}
    | {"full_attention_interval": 3},
}


class Talk:
    """An engine, and the time that sequences take to their first tokens."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._engine = Engine(loaded, EngineConfig("", prefill_chunk=512))
        self._draw = random.Random(0)
        self._count = 0

    def prompt(self, length: int) -> list[int]:
        """Random ids."""
        return [self._draw.randrange(3, VOCAB) for _ in range(length)]

    def say(self, prompt: list[int]) -> tuple[float, list[int]]:
        """Seconds to the first token, and the tokens."""
        self._count += 1
        spec = SequenceSpec(str(self._count), "m", tuple(prompt), SamplingParams(ANSWER, 0, ignore_eos=True))
        tokens: list[int] = []
        first_s = 0.0
        began = time.perf_counter()
        self._engine.submit([RowRequest(spec)])
        while self._engine.busy:
            for event in self._engine.turn().events:
                first_s = first_s or time.perf_counter() - began
                tokens += event.tokens
        return first_s, tokens


def second_turn(talk: Talk) -> tuple[float, float]:
    """Seconds to the first token: of a second turn, and of a prompt of its length that is new."""
    prompt = talk.prompt(PROMPT)
    _, answer = talk.say(prompt)
    warm_s, _ = talk.say([*prompt, *answer, *talk.prompt(QUESTION)])
    cold_s, _ = talk.say(talk.prompt(PROMPT + ANSWER + QUESTION))
    return warm_s, cold_s


def choose(parser: argparse.ArgumentParser) -> None:
    """Arguments that say which models are measured."""
    parser.add_argument("--kind", choices=list(KINDS), action="append")
    parser.add_argument("--qwen3", choices=list(SHAPES), help="instead: one of this shape in bfloat16, for a GPU")


def chosen(args: argparse.Namespace) -> Iterator[tuple[str, LoadedModel]]:
    """Their names and they, made one after another."""
    if args.qwen3:
        yield args.qwen3, random_model(SHAPES[args.qwen3], "bfloat16")
        return
    for kind in args.kind or KINDS:
        yield kind, in_memory(SHAPE | KINDS[kind])


def main() -> None:
    """Measure each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    choose(parser)
    args = parser.parse_args()
    print(f"second turn after {PROMPT} tokens and an answer of {ANSWER}, first token: warm / cold")
    for kind, loaded in chosen(args):
        talk = Talk(loaded)
        second_turn(talk)
        pairs = [second_turn(talk) for _ in range(args.rounds)]
        warm, cold = (1e3 * median(each) for each in zip(*pairs, strict=True))
        ratio = median(warm_s / cold_s for warm_s, cold_s in pairs)
        print(f"{kind:20s} {ratio:.3f}   ({warm:,.0f} / {cold:,.0f} ms)   aim: at most {AIM}", flush=True)


if __name__ == "__main__":
    main()
