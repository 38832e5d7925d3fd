"""The grammar that bounds reasoning: what may come when, in each family's marks."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from api.openai.bodies import ChatCompletionRequest
from shared.errors import UnsupportedParameterError
from shared.text import grammar
from shared.text.codec import TextCodec, TokenizerBundle
from shared.text.languages.families import REASONINGS, Thinking
from shared.text.languages.grammars import after_reasoning, can_bound
from tests.unit.api_texts import bundle, codec

THINK, HARMONY, GEMMA, KIMI = (REASONINGS[name] for name in ("think", "harmony", "gemma4", "kimi_k3"))


def with_tokens(*marks: str) -> TextCodec:
    document = json.loads(bundle().tokenizer_json)
    for at, mark in enumerate(marks, codec().vocab_size):
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        document["added_tokens"].append({"id": at, "content": mark, **plain})
    return TextCodec(TokenizerBundle(json.dumps(document), "", (0,), {}))


MARKED = with_tokens("<think>", "</think>")
CHANNELS = with_tokens("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
GEMMAS = with_tokens("<|channel>", "<channel|>")
KIMIS = with_tokens("<|open|>", "<|close|>", "<|sep|>")


def taken(text: str, completion: str, marked: TextCodec) -> str:
    """As much of a completion as the grammar allows."""
    tokenizer = grammar.tokenizer_of(marked.bundle, marked.vocab_size)
    grammar.check(text, tokenizer)
    ids = marked.encode(completion, add_special_tokens=False)
    count = grammar.matcher_of(text, tokenizer).try_consume_tokens(ids)
    return marked.decode(ids[:count], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("thinking", "completion", "cut"),
    [
        ("open", "abcd</think>any <think>", ""),
        ("open", "abcde", "e"),
        ("open", "ab</think>as long as it likes", ""),
        ("open", "abcd</think><think>wxyz</think>", ""),
        ("open", "abcd</think><think>wxyz0", "0"),
        ("may", "as long as it likes", ""),
        ("may", "<think>abcd</think>so", ""),
        ("may", "<think>abcde", "e"),
    ],
)
def test_each_piece_of_reasoning_ends_at_its_budget(thinking: Thinking, completion: str, cut: str) -> None:
    completion = completion.replace("a", "1").replace("b", "2")  # digits have a token each
    completion = "".join(str(ord(letter) % 10) if letter in "cdewxyz" else letter for letter in completion)
    text = after_reasoning("", thinking, THINK, MARKED, most=4)
    assert len(taken(text, completion, MARKED)) == len(completion) - len(cut)


def test_after_the_budget_nothing_but_the_mark_may_come() -> None:
    text = after_reasoning("", "open", THINK, MARKED, most=2)
    matcher = grammar.matcher_of(text, grammar.tokenizer_of(MARKED.bundle, MARKED.vocab_size))
    end = MARKED.added_token("</think>")
    for _ in range(2):
        assert len(matcher.compute_bitmask()) and matcher.consume_token(MARKED.encode("1", False)[0])
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    assert [token for token in range(MARKED.vocab_size) if bits >> token & 1] == [end]


@pytest.mark.parametrize("most", [0, 1, 3])
def test_an_answer_of_a_form_follows_bounded_reasoning(most: int) -> None:
    text = after_reasoning(grammar.of_regex("[a-f]+"), "open", THINK, MARKED, most)
    assert taken(text, f"{'1' * most}</think>abc", MARKED).endswith("abc")
    assert taken(text, f"{'1' * (most + 1)}</think>abc", MARKED) == "1" * most
    assert taken(text, "</think>xyz", MARKED) == "</think>"
    eos = MARKED.bundle.eos_token_ids[0]
    matcher = grammar.matcher_of(text, grammar.tokenizer_of(MARKED.bundle, MARKED.vocab_size))
    assert matcher.try_consume_tokens([eos]) == 0, "an answer is demanded"


@pytest.mark.parametrize(
    ("reasoning", "marked", "thinking", "completion", "whole"),
    [
        (HARMONY, CHANNELS, "may", "<|channel|>analysis<|message|>123<|end|><|start|>assistant", True),
        (HARMONY, CHANNELS, "may", "<|channel|>analysis<|message|>1234", False),
        (HARMONY, CHANNELS, "may", "<|channel|>final<|message|>1234567", True),
        (HARMONY, CHANNELS, "open", "123<|end|><|start|>assistant<|channel|>analysis<|message|>1234", False),
        (GEMMA, GEMMAS, "may", "<|channel>thought123<channel|>1234567", True),
        (GEMMA, GEMMAS, "may", "<|channel>thought1234", False),
        (GEMMA, GEMMAS, "", "1234567<|channel>thought1234", False),
        (KIMI, KIMIS, "open", "123<|close|>think<|sep|><|open|>response<|sep|>1234567", True),
        (KIMI, KIMIS, "open", "123<|close|>1", False),
    ],
)
def test_other_families_marks_are_kept(
    reasoning: Any, marked: TextCodec, thinking: Thinking, completion: str, whole: bool
) -> None:
    text = after_reasoning("", thinking, reasoning, marked, most=3)
    assert (taken(text, completion, marked) == completion) is whole


def test_marks_that_are_no_tokens_cannot_bound() -> None:
    assert can_bound(THINK, MARKED) and not can_bound(THINK, codec())
    with pytest.raises(UnsupportedParameterError, match="no token of its vocabulary"):
        after_reasoning("", "open", THINK, codec(), most=4)


def test_without_a_budget_or_reasoning_nothing_is_enforced() -> None:
    assert after_reasoning("", "open", THINK, MARKED) == ""
    assert after_reasoning("", "", THINK, MARKED, most=4) == ""


def test_a_budget_has_two_names_that_may_not_differ() -> None:
    def budget(**fields: Any) -> int | None:
        messages = [{"role": "user", "content": "hi"}]
        return ChatCompletionRequest.model_validate({"model": "m", "messages": messages, **fields}).max_reasoning_tokens

    assert budget(max_reasoning_tokens=7) == budget(thinking_token_budget=7) == 7
    assert budget(thinking_token_budget=-1) is None and budget(max_reasoning_tokens=0) == 0
    with pytest.raises(ValidationError, match="differ"):
        budget(max_reasoning_tokens=7, thinking_token_budget=8)
