"""Damaged and odd picture files among good ones, against a running server whose model sees.

`python -m tests.e2e.bad_images URL --model NAME --pictures 2000` runs long against a server that you started.

Every answer is a 200 (202) or a 400 (413); a good picture's greedy answer is always the same.
"""

import argparse
import asyncio
import base64
import io
import json
import random
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import numpy as np
from PIL import Image

from tests.waiting import HANG_S

FORMS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
TYPES = ("image/png", "image/jpeg", "image/tiff", "image/svg+xml", "text/html", "application/x-\u00e9")
GOOD = 0.25  # share of the pictures
ORIENTATION = 0x0112


class Sent(NamedTuple):
    """A file, and how it is sent."""

    kind: str
    data: bytes
    declared: str = "image/png"


def drawn(dice: random.Random, most: int = 90) -> Image.Image:
    """Random spots, in one of Pillow's modes."""
    width, height = dice.randint(1, most), dice.randint(1, most)
    spots = np.frombuffer(dice.randbytes(width * height * 3), np.uint8).reshape(height, width, 3)
    return Image.fromarray(spots).convert(dice.choice(("RGB", "L", "P", "1")))


def written(image: Image.Image, form: str, **more: Any) -> bytes:
    """Its file."""
    file = io.BytesIO()
    try:
        image.save(file, form, **more)
    except OSError:  # a mode that this form has not
        image.convert("RGB").save(file, form, **more)
    return file.getvalue()


def claimed(dice: random.Random) -> bytes:
    """A PNG that says it is much larger than it is, or that it has no size, or whose data grow when they are read."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = dice.choice(
        ((0, 0), (0, 9), (9, 0), (60_000, 60_000), (2**31 - 1, 1), (8000, 8000), (16_385, 200), (6300, 6300))
    )
    head = struct.pack(">IIBBBBB", *size, dice.choice((1, 8, 16)), dice.choice((0, 2, 3, 6)), 0, 0, 0)
    body = zlib.compress(bytes(dice.choice((10, 1000, 4 << 20))))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def flipped(dice: random.Random) -> bytes:
    """A few bits are others."""
    data = bytearray(written(drawn(dice), dice.choice(FORMS)))
    for _ in range(dice.randint(1, 12)):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(data)


def cut(dice: random.Random) -> bytes:
    """Only the beginning, perhaps with other things behind it."""
    data = written(drawn(dice), dice.choice(FORMS))
    return data[: dice.randrange(len(data))] + dice.choice((b"", dice.randbytes(50), data))


def spliced(dice: random.Random) -> bytes:
    """The beginning of one file, the end of another."""
    first, second = (written(drawn(dice), dice.choice(FORMS)) for _ in range(2))
    return first[: dice.randrange(len(first))] + second[dice.randrange(len(second)) :]


def moving(dice: random.Random) -> bytes:
    """Several pictures in one file."""
    frames = [drawn(dice).convert("RGB").resize((20, 20)) for _ in range(dice.randint(2, 9))]
    return written(frames[0], dice.choice(("GIF", "WEBP", "PNG", "TIFF")), save_all=True, append_images=frames[1:])


def turned(dice: random.Random) -> bytes:
    """With an orientation, or what is none."""
    exif = Image.Exif()
    exif[ORIENTATION] = dice.choice((1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 65_535))
    return written(drawn(dice), dice.choice(("JPEG", "PNG", "WEBP")), exif=exif)


def noise(dice: random.Random) -> bytes:
    """No picture, though it may begin like one."""
    heads = (b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF....WEBP", b"BM", b"II*\0", b"<svg/>")
    return dice.choice(heads) + dice.randbytes(dice.choice((0, 1, 30, 3000)))


def thin(dice: random.Random) -> bytes:
    """Of odd proportions, within and beyond what is taken."""
    size = dice.choice(((1, 1), (1, 100), (101, 1), (1, 4000), (3000, 20), (2000, 2000)))
    return written(Image.new("RGB", size, (dice.randrange(256), 0, 0)), dice.choice(("PNG", "BMP", "GIF")))


def whole(dice: random.Random) -> bytes:
    """As it should be, of any of the kinds."""
    return written(drawn(dice), dice.choice(FORMS))


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    each.__name__: each for each in (claimed, flipped, cut, spliced, moving, turned, noise, thin, whole)
}


def made(dice: random.Random) -> Sent:
    """One of them, by whatever name."""
    kind = dice.choice(list(KINDS))
    return Sent(kind, KINDS[kind](dice), dice.choice(TYPES))


def bodies(model: str, sent: Sent, sampler: str = "", number: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """The same picture in each way that it may be sent; `sampler`: one of Tinker's, and its next sample's number."""
    text = base64.b64encode(sent.data).decode()
    url, ask = f"data:{sent.declared};base64,{text}", "What is it?"
    common = {"model": model, "temperature": 0}
    chat = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": ask}]
    told = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": ask}]
    theirs = sent.declared if sent.declared in TYPES[:2] else TYPES[0]  # others are refused before the file is read
    source = {"type": "base64", "media_type": theirs, "data": text}
    block = [{"type": "image", "source": source}, {"type": "text", "text": ask}]
    chunks = [{"type": "image", "data": text, "format": "png"}, {"type": "encoded_text", "tokens": [5]}]
    sample = {"prompt": {"chunks": chunks}, "sampling_params": {"max_tokens": 3}, "num_samples": 2}
    return [
        ("/v1/chat/completions", {**common, "max_tokens": 3, "messages": [{"role": "user", "content": chat}]}),
        (
            "/v1/responses",
            {**common, "max_output_tokens": 16, "store": False, "input": [{"role": "user", "content": told}]},
        ),
        ("/v1/messages", {**common, "max_tokens": 3, "messages": [{"role": "user", "content": block}]}),
        ("/v1/jobs", {"kind": "generate", **common, "max_tokens": 3, "prompts": [[{"role": "user", "content": chat}]]}),
        ("/api/v1/asample", {"sampling_session_id": sampler, "seq_id": number, **sample}),
    ]


async def attack(url: str, model: str, pictures: int, seed: int = 17, at_once: int = 8) -> Counter[tuple[str, int]]:
    """Send so many; how many of each kind were answered with which status. AssertionError for any other answer."""
    dice, counts, turn = random.Random(seed), Counter[tuple[str, int]](), asyncio.Semaphore(at_once)
    good = Sent("good", written(drawn(random.Random(1)).convert("RGB"), "PNG"))
    said = set[str]()

    async def send(client: httpx.AsyncClient, sent: Sent, way: int, number: int) -> None:
        path, body = bodies(model, sent, sampler, number)[0 if sent.kind == "good" else way]
        try:
            answer = await client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        finally:
            turn.release()
        counts[sent.kind, answer.status_code] += 1
        assert answer.status_code in ((200,) if sent.kind == "good" else (200, 202, 400, 413)), (
            sent.kind,
            way,
            answer.text,
        )
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"], answer.text
        if sent.kind == "good":
            said.add(answer.json()["choices"][0]["message"]["content"])

    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as client, asyncio.TaskGroup() as group:
        session = (await client.post("/api/v1/create_session", json={})).json()["session_id"]
        asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": model}
        made_sampler = await client.post("/api/v1/create_sampling_session", json=asked)
        sampler = made_sampler.json()["sampling_session_id"]
        for number in range(pictures):
            await turn.acquire()
            sent = good if dice.random() < GOOD else made(dice)
            group.create_task(send(client, sent, dice.randrange(5), number))
    assert len(said) == 1, f"one picture, several answers: {said}"
    return counts


def main() -> None:
    """Against a server that runs."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bad_images", description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--model", default="tiny-vision")
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=17)
    given = parser.parse_args()
    counts = asyncio.run(attack(given.url, given.model, given.pictures, given.seed))
    for kind in ("good", *KINDS):
        print(f"{kind:8s}", {status: count for (each, status), count in sorted(counts.items()) if each == kind})


if __name__ == "__main__":
    main()
