r"""Tasks whose answers a few lines of code can judge, and their reward: JSON, counted words, lists.

    python -m examples.short_answers --out short-answers
    mlx_parallm_train --connect-to 127.0.0.1:8000 --model MODEL --config trainer/recipes/smollm2-sft.yaml
    mlx_parallm_train --connect-to 127.0.0.1:8000 --model MODEL --config trainer/recipes/smollm2-grpo.yaml

The first command writes `shown.jsonl` (answers for SFT, to a part of what is asked), `tasks.jsonl` (prompts to earn
rewards with) and `held_out.jsonl` (prompts about people, places and things that neither of these names). The examples
show two of four fields, the shorter of the sentences and of the lists: the rest is left to the reward.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

FIELDS = ("name", "job", "city", "age")
SHOWN_FIELDS = FIELDS[:2]
WORDS, SHOWN_WORDS = range(3, 9), range(3, 6)
LINES, SHOWN_LINES = range(2, 7), range(2, 4)
TAILS = {  # of sentences that begin with "Dogs are", by their number of words
    1: ("useful", "common", "different"),
    2: ("very useful", "quite common", "often small"),
    3: ("useful to people", "found in towns", "liked by many"),
}


@dataclass(frozen=True)
class World:
    """What prompts speak of. No word of one is in the other."""

    names: Sequence[str]
    jobs: Sequence[str]
    cities: Sequence[str]
    topics: Sequence[str]  # with an s at the end
    kinds: dict[str, Sequence[str]]  # of things, with some of them


TAUGHT = World(
    names=("Mara", "Otto", "Lina", "Hugo", "Vera", "Emil", "Nora", "Karl", "Ruth", "Paul", "Ines", "Kurt"),
    jobs=("cook", "pilot", "nurse", "baker", "farmer", "tailor"),
    cities=("Oslo", "Rome", "Paris", "Lima", "Cairo", "Madrid", "Vienna", "Dublin"),
    topics=("dogs", "trees", "cars", "books", "birds", "schools", "rivers", "songs", "clocks", "bridges"),
    kinds={
        "fruit": ("apple", "pear", "plum", "cherry", "grape", "peach"),
        "animal": ("dog", "cow", "lion", "goat", "mouse", "whale"),
        "colour": ("red", "blue", "green", "yellow", "brown", "pink"),
        "tool": ("hammer", "saw", "drill", "wrench", "knife", "axe"),
        "metal": ("iron", "gold", "silver", "copper", "tin", "lead"),
        "sport": ("tennis", "football", "golf", "rugby", "hockey", "chess"),
    },
)
HELD_OUT = World(
    names=("Rosa", "Theo", "Anna", "Jens", "Lara", "Omar", "Elsa", "Finn"),
    jobs=("teacher", "doctor", "painter", "singer"),
    cities=("London", "Berlin", "Tokyo", "Athens", "Boston", "Prague"),
    topics=("horses", "flowers", "trains", "houses", "games", "islands", "lakes", "roses", "doors", "kings", "farmers"),
    kinds=dict.fromkeys(
        ("vegetable", "drink", "country", "instrument", "planet", "fish", "flower", "language", "garment", "dance"), ()
    ),
)


def copying(world: World, draw: random.Random, fields: Sequence[str]) -> tuple[str, str, dict[str, Any]]:
    """A person, of whom one field is asked for; prompt, an answer, and what the reward needs."""
    person = {"name": draw.choice(world.names), "job": draw.choice(world.jobs), "city": draw.choice(world.cities)}
    about = person | {"age": draw.randint(18, 80)}
    field = draw.choice(fields)
    prompt = f"{about['name']} is a {about['job']} from {about['city']} and {about['age']} years old. "
    answer = {field: about[field]}
    return f"{prompt}Give the {field} as JSON.", json.dumps(answer), {"kind": "json", "answer": answer}


def counting(world: World, draw: random.Random, counts: Sequence[int]) -> tuple[str, str, dict[str, Any]]:
    """A sentence of so many words."""
    count, topic = draw.choice(counts), draw.choice(world.topics)
    tail = draw.choice(TAILS.get(count - 2, TAILS[1]))
    prompt = f"Write a sentence of exactly {count} words about {topic}."
    return prompt, f"{topic.capitalize()} are {tail}.", {"kind": "words", "count": count, "about": topic[:-1]}


def listing(world: World, draw: random.Random, counts: Sequence[int]) -> tuple[str, str, dict[str, Any]]:
    """Things of one kind, each on a line of its own."""
    count, kind = draw.choice(counts), draw.choice(list(world.kinds))
    things = draw.sample(world.kinds[kind], count) if count <= len(world.kinds[kind]) else []
    prompt = f"Name {count} things of the kind {kind}, each on a line that begins with a dash."
    return prompt, "\n".join(f"- {thing}" for thing in things), {"kind": "lines", "count": count}


def tasks(world: World, seed: int, *, shown: bool = False) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Tasks without end, of the three kinds in turn; `shown`: only such as have an answer to show."""
    draw = random.Random(seed)
    while True:
        yield copying(world, draw, SHOWN_FIELDS if shown else FIELDS)
        yield counting(world, draw, SHOWN_WORDS if shown else WORDS)
        yield listing(world, draw, SHOWN_LINES if shown else LINES)


def reward(completion: str, reference: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """1 for what was asked, up to a half for an answer that comes near it; the part says of which kind it is."""
    value = JUDGES[reference["kind"]](completion.strip(), reference)
    return value, {reference["kind"]: value}


def _json(text: str, reference: dict[str, Any]) -> float:
    try:
        answer = json.loads(text)
    except ValueError:
        return 0.0
    if answer == reference["answer"]:
        return 1.0
    return 0.4 if isinstance(answer, dict) and list(answer) == list(reference["answer"]) else 0.1


def _words(text: str, reference: dict[str, Any]) -> float:
    words = re.findall(r"[\w'-]+", text.lower())
    is_sentence = re.fullmatch(r"[A-Z][\w',; -]*\.", text) is not None and len(set(words)) == len(words)
    if not is_sentence or not any(word.startswith(reference["about"]) for word in words):
        return 0.0
    off = abs(len(words) - reference["count"])
    return 1.0 if off == 0 else max(0.0, 0.5 - 0.1 * off)


def _lines(text: str, reference: dict[str, Any]) -> float:
    lines = text.splitlines()
    items = {line.lower() for line in lines if re.fullmatch(r"- \w[\w' -]{1,24}", line)}
    if not lines or len(items) < len(lines):
        return 0.2 * len(items) / max(1, len(lines))
    off = abs(len(lines) - reference["count"])
    return 1.0 if off == 0 else max(0.2, 0.5 - 0.1 * off)


JUDGES = {"json": _json, "words": _words, "lines": _lines}


def write(out: Path, shown: int = 96, learned: int = 480, each_held_out: int = 32) -> None:
    """Write the three data sets; what is held out is asked once."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "shown.jsonl").open("w") as file:
        for prompt, answer, _ in islice(tasks(TAUGHT, 1, shown=True), shown):
            said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": said}) + "\n")
    once = {prompt: reference for prompt, _, reference in islice(tasks(HELD_OUT, 3), 3000)}
    of_kinds = [[each for each in once.items() if each[1]["kind"] == kind][:each_held_out] for kind in JUDGES]
    _write_tasks(out / "held_out.jsonl", [each for kind in of_kinds for each in kind])
    _write_tasks(out / "tasks.jsonl", [(prompt, known) for prompt, _, known in islice(tasks(TAUGHT, 2), learned)])


def _write_tasks(path: Path, asked: Sequence[tuple[str, dict[str, Any]]]) -> None:
    lines = [{"prompt": [{"role": "user", "content": prompt}], "reference": known} for prompt, known in asked]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("short-answers"))
    folder = parser.parse_args().out
    write(folder)
    for written in sorted(folder.glob("*.jsonl")):
        print(f"{written}: {len(written.read_text().splitlines())} lines")
