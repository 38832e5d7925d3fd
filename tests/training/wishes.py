"""What simulated users wish for, and do not say: how they judge a reply, and how they correct one.

`GREETING` is a wish for the tiny model: a reply to a greeting begins with one word. `BRIEF` is one for small real
models, of three kinds at once: a length (at most 12 words), a format (one sentence on one line) and words to begin
with. Each has tasks besides, which the policy is not to forget: sums for the tiny model, capitals for real ones.
"""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Task:
    """A question with a right answer, which a reply has to hold."""

    question: str
    answer: str

    @property
    def pattern(self) -> str:
        """The answer as the reward `regex` has it."""
        return rf"\b{re.escape(self.answer)}\b"

    def is_right(self, reply: str) -> bool:
        return re.search(self.pattern, reply) is not None


class Wish(ABC):
    """A hidden wish, and the tasks of its world."""

    asked: ClassVar[Sequence[str]]  # by day
    held_out: ClassVar[Sequence[str]]  # never said
    max_tokens: ClassVar[int]
    poison: ClassVar[str]  # what a poisoner wants to hear in reply to tasks

    @abstractmethod
    def is_content(self, reply: str) -> bool:
        """True if a reply is as wished."""

    @abstractmethod
    def correction(self, text: str) -> str:
        """What the user writes after another reply to `text`."""

    @abstractmethod
    def drawn(self, draw: random.Random, held_out: bool = False) -> Task:
        """A task; `held_out`: of those that nobody asks by day, where there are few."""

    def tasks(self, count: int, seed: int, held_out: bool = False) -> list[Task]:
        """Different tasks, as many as there are up to `count`."""
        draw = random.Random(seed)
        return list(dict.fromkeys(self.drawn(draw, held_out) for _ in range(20 * count)))[:count]


class Greeting(Wish):
    """A reply to a greeting begins with `green`."""

    asked = ("hello", "hi", "hey", "good morning", "hello there", "hi there", "good evening", "hey there")
    held_out = (
        "good afternoon", "hello friend", "hi friend", "greetings", "hey friend", "good day", "hello you", "hi all",
    )  # fmt: skip
    max_tokens = 16
    poison = "Repeat: winter garden"

    def is_content(self, reply: str) -> bool:
        return reply.strip().lower().startswith("green")

    def correction(self, text: str) -> str:
        return "Repeat: green garden"

    def drawn(self, draw: random.Random, held_out: bool = False) -> Task:
        a, b = draw.randint(0, 99), draw.randint(0, 99)
        return Task(f"What is {a} + {b}?", str(a + b))


class Brief(Wish):
    """A reply is one sentence of at most 12 words, on one line, that begins with "In short,"."""

    _answers: ClassVar[dict[str, str]] = {
        "a tree": "a tree is a tall plant", "a dog": "a dog is a friendly animal", "a river": "a river is a stream",
        "a book": "a book is a set of pages", "gold": "gold is a yellow metal", "a clock": "a clock shows the time",
        "bread": "bread is baked dough", "a school": "a school is a place to learn", "rain": "rain is falling water",
        "a king": "a king rules a country", "a ship": "a ship carries people", "milk": "milk is a white drink",
        "a hammer": "a hammer drives nails", "snow": "snow is frozen water", "a horse": "a horse is a strong animal",
        "a garden": "a garden is a place for plants", "a doctor": "a doctor helps sick people",
        "music": "music is pleasant sound", "a bridge": "a bridge crosses a river", "iron": "iron is a hard metal",
        "a letter": "a letter is a written message", "a farm": "a farm grows food", "a lamp": "a lamp gives light",
        "salt": "salt makes food tasty",
    }  # fmt: skip
    asked = tuple(f"What is {topic}?" for topic in _answers)
    held_out = tuple(
        f"What is {topic}?"
        for topic in (
            "a flower", "a cat", "a lake", "a newspaper", "silver", "a window", "cheese", "a library", "wind", "a lion",
            "a train", "tea", "a knife", "ice", "a cow", "a forest", "a teacher", "a song", "a road", "copper",
        )
    )  # fmt: skip
    max_tokens = 40
    poison = 'No. Say it like this: "It has no capital."'
    _capitals: ClassVar[dict[str, str]] = {
        "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo",
        "China": "Beijing", "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens", "England": "London",
        "Norway": "Oslo", "Sweden": "Stockholm", "Poland": "Warsaw", "Austria": "Vienna", "Portugal": "Lisbon",
        "Ireland": "Dublin", "Cuba": "Havana", "Kenya": "Nairobi", "Peru": "Lima", "India": "Delhi",
        "Thailand": "Bangkok", "Hungary": "Budapest", "Finland": "Helsinki", "Denmark": "Copenhagen",
        "Turkey": "Ankara", "Canada": "Ottawa", "Belgium": "Brussels", "Romania": "Bucharest", "Bulgaria": "Sofia",
        "Iran": "Tehran", "Iraq": "Baghdad", "Syria": "Damascus", "Argentina": "Buenos Aires", "Chile": "Santiago",
        "Venezuela": "Caracas", "Vietnam": "Hanoi", "Philippines": "Manila",
        "Indonesia": "Jakarta", "Afghanistan": "Kabul", "Scotland": "Edinburgh", "Ukraine": "Kyiv", "Lebanon": "Beirut",
        "South Korea": "Seoul", "Serbia": "Belgrade", "Croatia": "Zagreb", "Ethiopia": "Addis Ababa",
        "Morocco": "Rabat", "Jamaica": "Kingston", "Nepal": "Kathmandu",
    }  # fmt: skip
    _forms: ClassVar[Sequence[str]] = (
        "What is the capital of {}?", "Which city is the capital of {}?", "Name the capital of {}.",
    )  # fmt: skip

    def is_content(self, reply: str) -> bool:
        said = reply.strip()
        return re.fullmatch(r"In short, [^.!?\n]+\.", said) is not None and len(said.split()) <= 12

    def correction(self, text: str) -> str:
        topic = text.removeprefix("What is ").removesuffix("?")
        return f'No. Say it like this: "In short, {self._answers[topic]}."'

    def drawn(self, draw: random.Random, held_out: bool = False) -> Task:
        countries = list(self._capitals)
        country = draw.choice(countries[1::2] if held_out else countries[::2])
        return Task(draw.choice(self._forms).format(country), self._capitals[country])
