"""Synthetic pictures with questions about them: a digit, or one to five shapes, of one colour on a plain ground.

What is asked: which digit, which colour, which shape, how many. One answer is right, and is one word.
"""

import random
from collections.abc import Callable
from typing import Literal, NamedTuple

from PIL import Image, ImageDraw, ImageFont

Task = Literal["digit", "colour", "shape", "count"]
TASKS: tuple[Task, ...] = ("digit", "colour", "shape", "count")
SIDE = 96  # pixels of a picture
MOST = 5  # shapes in it
QUESTIONS: dict[Task, tuple[str, ...]] = {
    "digit": ("Which digit is this?", "What digit do you see?", "Read the digit."),
    "colour": ("What colour is it?", "Which colour do you see?", "Name the colour."),
    "shape": ("What shape is it?", "Which shape do you see?", "Name the shape."),
    "count": ("How many are there?", "How many do you see?", "Count them."),
}
COLOURS = {
    "red": (214, 40, 40),
    "green": (34, 139, 34),
    "blue": (38, 70, 200),
    "yellow": (240, 200, 20),
    "purple": (128, 40, 150),
    "orange": (245, 130, 20),
}
_GROUNDS = ((255, 255, 255), (235, 235, 225), (20, 20, 25), (60, 60, 65), (200, 215, 225))

Box = tuple[int, int, int, int]


class PictureExample(NamedTuple):
    """A picture, and one question about it."""

    picture: Image.Image
    task: Task
    question: str
    answer: str


def example(rng: random.Random, task: Task | None = None) -> PictureExample:
    """One of a task, any task when none is named."""
    asked: Task = rng.choice(TASKS) if task is None else task
    colour = rng.choice(sorted(COLOURS))
    picture = Image.new("RGB", (SIDE, SIDE), rng.choice(_GROUNDS))
    draw = ImageDraw.Draw(picture)
    has_digit = asked == "digit" or (asked == "colour" and rng.random() < 0.4)
    answers: dict[str, str] = {"colour": colour}
    if has_digit:
        answers["digit"] = str(rng.randrange(10))
        _draw_digit(draw, rng, answers["digit"], COLOURS[colour])
    else:
        answers["shape"] = rng.choice(sorted(_SHAPES))
        count = rng.randint(1, MOST)
        answers["count"] = str(count)
        for box in _boxes(rng, count):
            _SHAPES[answers["shape"]](draw, box, COLOURS[colour])
    return PictureExample(picture, asked, rng.choice(QUESTIONS[asked]), answers[asked])


def counting(rng: random.Random) -> PictureExample:
    """A task that the model was not trained on: count shapes of one of two colours."""
    colour, other = rng.sample(sorted(COLOURS), 2)
    picture = Image.new("RGB", (SIDE, SIDE), rng.choice(_GROUNDS))
    draw = ImageDraw.Draw(picture)
    shape, count, others = rng.choice(sorted(_SHAPES)), rng.randint(1, 4), rng.randint(0, 4)
    for number, box in enumerate(_boxes(rng, count + others)):
        _SHAPES[shape](draw, box, COLOURS[colour if number < count else other])
    return PictureExample(picture, "count", f"Count the {colour}.", str(count))


def _draw_digit(draw: ImageDraw.ImageDraw, rng: random.Random, digit: str, colour: tuple[int, int, int]) -> None:
    size = rng.randint(48, 80)
    place = (SIDE // 2 + rng.randint(-12, 12), SIDE // 2 + rng.randint(-10, 10))
    draw.text(place, digit, fill=colour, font=ImageFont.load_default(size), anchor="mm")


def _boxes(rng: random.Random, count: int) -> list[Box]:
    """Places of shapes that do not touch: cells of a grid, each with some play."""
    cell = SIDE // 3
    cells = rng.sample([(column, row) for row in range(3) for column in range(3)], count)
    boxes: list[Box] = []
    for column, row in cells:
        side = rng.randint(20, cell - 5)
        left, top = column * cell + rng.randint(1, cell - side - 2), row * cell + rng.randint(1, cell - side - 2)
        boxes.append((left, top, left + side, top + side))
    return boxes


def _triangle(draw: ImageDraw.ImageDraw, box: Box, colour: tuple[int, int, int]) -> None:
    left, top, right, bottom = box
    draw.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=colour)


def _cross(draw: ImageDraw.ImageDraw, box: Box, colour: tuple[int, int, int]) -> None:
    left, top, right, bottom = box
    third = (right - left) // 3
    draw.rectangle((left, top + third, right, bottom - third), fill=colour)
    draw.rectangle((left + third, top, right - third, bottom), fill=colour)


_SHAPES: dict[str, Callable[[ImageDraw.ImageDraw, Box, tuple[int, int, int]], None]] = {
    "circle": lambda draw, box, colour: draw.ellipse(box, fill=colour),
    "square": lambda draw, box, colour: draw.rectangle(box, fill=colour),
    "triangle": _triangle,
    "cross": _cross,
}
SHAPES = tuple(sorted(_SHAPES))
