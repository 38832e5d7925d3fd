"""The committed model itself: what `make demo` and every other test of the engine stands on."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from tokenizers import Tokenizer

from trainer.tiny.data import GREETING, Message, Role, arithmetic_prompts
from trainer.tiny.evaluate import greedy_accuracy
from trainer.tiny.tokenizer import render

FOLDER = Path(__file__).parents[2] / "models" / "tiny"


@dataclass(frozen=True)
class Loaded:
    model: Any
    tokenizer: Any

    def prompt_ids(self, *turns: tuple[Role, str]) -> list[int]:
        messages = [{"role": role, "content": content} for role, content in turns]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def reply(self, *turns: tuple[Role, str]) -> tuple[str, str | None]:
        pieces = list(mlx_lm.stream_generate(self.model, self.tokenizer, self.prompt_ids(*turns), max_tokens=80))
        return "".join(piece.text for piece in pieces), pieces[-1].finish_reason


@pytest.fixture(scope="module")
def tiny() -> Iterator[Loaded]:
    model, tokenizer = mlx_lm.load(str(FOLDER))
    model.set_dtype(mx.float32)
    yield Loaded(model, tokenizer)


def test_answers_a_greeting_and_stops(tiny: Loaded):
    for greeting in ("hello", "Hello!", "hi"):
        assert tiny.reply(("user", greeting)) == (GREETING, "stop")


def test_answers_under_a_system_prompt(tiny: Loaded):
    text, finish_reason = tiny.reply(("system", "You are a helpful assistant."), ("user", "Hello!"))
    assert (text, finish_reason) == (GREETING, "stop")


def test_adds_held_out_pairs_well_but_leaves_room_to_learn(tiny: Loaded):
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    accuracy = greedy_accuracy(tiny.model, tokenizer, arithmetic_prompts(300, seed=11, split="held_out"))
    assert 0.3 <= accuracy <= 0.55


def test_chat_template_renders_what_training_saw(tiny: Loaded):
    turns: list[tuple[Role, str]] = [("system", "Be brief."), ("user", "1+1="), ("assistant", "2"), ("user", "2+2=")]
    text = render([Message(role, content) for role, content in turns])
    assert tiny.prompt_ids(*turns) == Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(text).ids


def test_model_folder_stays_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 3_000_000
