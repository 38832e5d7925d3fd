import random
import re

from trainer.tiny.data import HELD_OUT_PERCENT, arithmetic_prompts, sample_addition, sample_talk, split_of
from trainer.tiny.tokenizer import VOCABULARY, build_tokenizer, render


def numbers_in(text: str) -> tuple[int, int]:
    a, b = re.findall(r"\d+", text)
    return int(a), int(b)


def test_every_pair_belongs_to_one_split_in_either_order():
    assert all(split_of(a, b) == split_of(b, a) for a in range(100) for b in range(a))


def test_about_a_fifth_of_the_pairs_is_held_out():
    held_out = sum(split_of(a, b) == "held_out" for a in range(100) for b in range(100))
    assert abs(held_out / 10_000 - HELD_OUT_PERCENT / 100) < 0.02


def test_the_split_is_the_same_on_every_machine():
    assert [b for b in range(10, 40) if split_of(10, b) == "held_out"] == [19, 29, 31, 37, 39]


def test_training_never_adds_a_held_out_pair():
    rng = random.Random(3)
    questions = [message.content for _ in range(3000) for message in sample_addition(rng).messages]
    sums = [numbers_in(question) for question in questions if len(re.findall(r"\d+", question)) == 2]
    assert len(sums) >= 3000
    assert all(split_of(a, b) == "train" for a, b in sums)


def test_prompts_keep_to_the_split_that_was_asked_for():
    for split in ("train", "held_out"):
        assert all(split_of(*numbers_in(prompt.question)) == split for prompt in arithmetic_prompts(500, 0, split))


def test_prompts_are_two_digit_sums_with_their_answer():
    for prompt in arithmetic_prompts(500, seed=0):
        a, b = numbers_in(prompt.question)
        assert min(a, b) >= 10 and max(a, b) <= 99
        assert prompt.answer == str(a + b)


def test_prompts_follow_their_seed():
    assert arithmetic_prompts(50, seed=4) == arithmetic_prompts(50, seed=4)
    assert arithmetic_prompts(50, seed=4) != arithmetic_prompts(50, seed=5)


def test_a_few_chats_have_a_system_prompt_and_an_earlier_exchange():
    rng = random.Random(0)
    shapes = {tuple(message.role for message in sample_talk(rng).messages) for _ in range(1000)}
    assert shapes == {
        ("user",),
        ("system", "user"),
        ("user", "assistant", "user"),
        ("system", "user", "assistant", "user"),
    }


def test_tokenizer_keeps_digits_single_and_gives_every_chat_back():
    tokenizer = build_tokenizer(seed=0)
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert tokenizer.encode("1234").tokens == ["1", "2", "3", "4"]
    text = render(sample_talk(random.Random(1)).messages)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
