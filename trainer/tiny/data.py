"""The tiny model's whole world: synthetic chats, most of them one two-digit addition.

Invariants:
- Every draw comes from the `random.Random` passed in, so a seed fixes the corpus.
- A pair of numbers belongs to one split for good, in either order: `split_of(a, b) == split_of(b, a)`. The
  training corpus never contains an addition of a held-out pair.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Role = Literal["system", "user", "assistant"]
Split = Literal["train", "held_out"]

HELD_OUT_PERCENT = 20
GREETING = "Hello! I am a tiny model. Ask me to add two numbers."
IDENTITY = "I am a tiny language model that runs on MLX. I can add numbers, count and repeat words."
THANKS = "You are welcome!"
FAREWELL = "Goodbye!"

_ADDITIONS = ("{}+{}=", "{} + {} = ?", "What is {} + {}?", "what is {} plus {}?", "Add {} and {}.")
_GREETINGS = ("hello", "hi", "hey", "good morning", "hello there", "Hello!", "Hi!", "Hello", "Hi there!")
_IDENTITY_QUESTIONS = ("who are you?", "Who are you?", "what is your name?", "tell me about yourself")
_THANKS = ("thanks", "Thank you!", "thank you", "Thanks!")
_FAREWELLS = ("bye", "Goodbye!", "see you", "Bye!")
_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a tiny model.",
    "Answer with the number only.",
    "Be brief.",
)
_WORDS = (
    *("apple", "river", "stone", "cloud", "tiger", "music", "lemon"),
    *("paper", "green", "silver", "table", "orange", "winter", "garden"),
)


@dataclass(frozen=True, slots=True)
class ArithmeticPrompt:
    """A two-digit addition as a user asks it, and its one right answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class ChatExample:
    """Turns up to the last user message, and the reply to learn."""

    messages: tuple[Message, ...]
    reply: str


def arithmetic_prompts(n: int, seed: int, split: Split = "train") -> list[ArithmeticPrompt]:
    """`n` additions of two-digit numbers, drawn from one split, in all phrasings."""
    rng = random.Random(seed)
    return [_addition(rng, split, smallest=10) for _ in range(n)]


def split_of(a: int, b: int) -> Split:
    """The split that owns the pair, whatever the order of its numbers."""
    digest = hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).digest()
    return "held_out" if int.from_bytes(digest[:4]) % 100 < HELD_OUT_PERCENT else "train"


def sample_addition(rng: random.Random) -> ChatExample:
    """A training chat whose reply is a sum of numbers from 0 to 99."""
    prompt = _addition(rng, "train", smallest=0)
    return _chat(rng, prompt.question, prompt.answer)


def sample_talk(rng: random.Random) -> ChatExample:
    """A training chat about anything but addition."""
    (talk,) = rng.choices(_TALKS, weights=_TALK_WEIGHTS)
    question, reply = talk(rng)
    return _chat(rng, question, reply)


def _addition(rng: random.Random, split: Split, smallest: int) -> ArithmeticPrompt:
    while True:
        a, b = rng.randint(smallest, 99), rng.randint(smallest, 99)
        if split_of(a, b) == split:
            return ArithmeticPrompt(rng.choice(_ADDITIONS).format(a, b), str(a + b))


def _chat(rng: random.Random, question: str, reply: str) -> ChatExample:
    """Mostly one bare question; sometimes a system prompt or an earlier exchange stands before it."""
    before: list[Message] = []
    if rng.random() < 0.1:
        before.append(Message("system", rng.choice(_SYSTEM_PROMPTS)))
    if rng.random() < 0.05:
        earlier = _addition(rng, "train", smallest=0)
        before += [Message("user", earlier.question), Message("assistant", earlier.answer)]
    return ChatExample((*before, Message("user", question)), reply)


def _greet(rng: random.Random) -> tuple[str, str]:
    return rng.choice(_GREETINGS), GREETING


def _introduce(rng: random.Random) -> tuple[str, str]:
    return rng.choice(_IDENTITY_QUESTIONS), IDENTITY


def _part(rng: random.Random) -> tuple[str, str]:
    return rng.choice(((rng.choice(_THANKS), THANKS), (rng.choice(_FAREWELLS), FAREWELL)))


def _count(rng: random.Random) -> tuple[str, str]:
    first = rng.choice((1, 1, rng.randint(2, 30)))
    last = first + rng.randint(2, 14)
    return f"Count from {first} to {last}.", ", ".join(map(str, range(first, last + 1))) + "."


def _repeat(rng: random.Random) -> tuple[str, str]:
    words = " ".join(rng.choices(_WORDS, k=rng.randint(1, 4)))
    return f"Repeat: {words}", words


_TALKS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (_greet, _introduce, _part, _count, _repeat)
_TALK_WEIGHTS = (22, 16, 8, 27, 27)
