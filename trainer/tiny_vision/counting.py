"""A data set of pictures to count in: `python -m trainer.tiny_vision.counting --out FOLDER`.

Lines of messages with a picture and the right answer: `train.jsonl`, and `held_out.jsonl`, whose pictures are others.
For reinforcement learning the answer is a reference, with `--answers` it is what is learned (`--mode sft`).
"""

import argparse
import base64
import io
import json
import random
from pathlib import Path
from typing import Any

from trainer.tiny_vision.data import PictureExample, counting

SIZES = {"train": 4096, "held_out": 512}


def line_of(example: PictureExample, *, answers: bool = False) -> dict[str, Any]:
    """A line of a data set; with `answers`, its right answer is included."""
    file = io.BytesIO()
    example.picture.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": example.question}]
    messages = [{"role": "user", "content": parts}]
    if answers:
        return {"prompt": messages, "completion": example.answer}
    return {"messages": messages, "reference": example.answer}


def main() -> None:
    """Write the data sets of counting."""
    parser = argparse.ArgumentParser(prog="python -m trainer.tiny_vision.counting", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--answers", action="store_true", help="for --mode sft")
    arguments = parser.parse_args()
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        rng = random.Random(f"counting {name}")
        lines = (json.dumps(line_of(counting(rng), answers=arguments.answers)) + "\n" for _ in range(size))
        (folder / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
