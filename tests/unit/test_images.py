"""Images of clients: which files are taken, the tiles of those that are, and what stands for them in a prompt."""

import asyncio
import base64
import gc
import hashlib
import io
import os
import random
import socket
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from itertools import product
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import uvloop
from PIL import Image

from api.checks.image_fetch import ImageFetch, public_address
from api.generation.named_images import _of_url
from api.http.limits import check_without_images
from shared.errors import (
    IncompatibleVersionError,
    InvalidRequestError,
    PayloadTooLargeError,
    ServiceUnavailableError,
)
from shared.image_files.pixels import tiles
from shared.image_files.reader import ImageReader
from shared.images.layout import layout
from shared.images.refs import ImageRef, VisionSpec, image_key, kv_ids
from shared.process.call_process import CallProcess
from shared.sequences import SamplingParams, SequenceSpec, decode_spec, encode
from tests.waiting import HANG_S

VISION = VisionSpec("idefics3", "<image>", 9, tile=32, longest_edge=128, tile_tokens=4)
PATCHES = VisionSpec("pixtral", "[IMG]", 9, tile=8, longest_edge=128, tile_tokens=1)
CLIENT = httpx.AsyncClient
PLAIN = SequenceSpec("s", "m", (1, 9, 9, 9, 9, 2), SamplingParams(1, 0))


def image(width: int = 40, height: int = 30, mode: str = "RGB", seed: int = 0) -> Image.Image:
    spots = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(spots).convert(mode)


def file_of(made: Image.Image, form: str = "PNG", **more: object) -> bytes:
    file = io.BytesIO()
    made.save(file, form, **more)
    return file.getvalue()


def png_of_claimed_size(width: int, height: int) -> bytes:
    """A few bytes that say they are a large image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.fixture
async def reader() -> AsyncIterator[ImageReader]:
    made = ImageReader(places=1)
    yield made
    made.close()


async def test_files_are_told_by_their_content_and_turned_as_they_say(reader: ImageReader) -> None:
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        assert await reader.size(file_of(image(), form)) == (40, 30)
    for mode in ("L", "LA", "RGBA", "P", "1"):
        assert await reader.size(file_of(image(mode=mode))) == (40, 30)
    turned = Image.Exif()
    turned[0x0112] = 6
    assert await reader.size(file_of(image(), "JPEG", exif=turned)) == (30, 40)


def test_grey_of_16_bits_keeps_its_shades_and_its_turn() -> None:
    shades = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)[:, :8]
    turned = Image.Exif()
    turned[0x0112] = 6
    shown = tiles(file_of(Image.fromarray(shades), exif=turned), PATCHES, "high")
    seen = np.frombuffer(shown.pictures[0], np.uint8).reshape(shown.height, shown.width, 3)
    assert (seen == np.rot90(shades >> 8, -1)[..., None]).all()


BAD: list[tuple[str, Callable[[], bytes], str]] = [
    ("empty", lambda: b"", "no image"),
    ("text", lambda: b"<svg/>" * 50, "no image"),
    ("another kind", lambda: file_of(image(), "TIFF"), "no image"),
    ("truncated", lambda: file_of(image(200, 200), "JPEG")[:-900], "truncated"),
    ("bomb", lambda: png_of_claimed_size(60_000, 60_000), "40000000 pixels"),
    ("large", lambda: png_of_claimed_size(8000, 8000), "8000 x 8000"),
    ("long", lambda: png_of_claimed_size(5000, 2), "times the other"),
    ("animated", lambda: file_of(image(), "GIF", save_all=True, append_images=[image(seed=1)]), "animated"),
]


async def test_other_files_are_refused_in_words(reader: ImageReader) -> None:
    for name, made, words in BAD:
        with pytest.raises(InvalidRequestError, match=words):
            await reader.size(made())
            pytest.fail(name)
    assert len(reader.idle) == 1, "the same process has answered all of them"


async def test_thumbnails_keep_proportions_within_their_bound(reader: ImageReader) -> None:
    for size, shown in ((400, 200), (128, 64)), ((30, 400), (10, 128)), ((40, 30), (40, 30)):
        small = Image.open(io.BytesIO(await reader.thumbnail(file_of(image(*size), "JPEG"), 128)))
        assert (small.format, small.size) == ("PNG", shown)
    with pytest.raises(InvalidRequestError, match="no image"):
        await reader.thumbnail(b"x", 128)


async def test_a_tenant_with_many_files_is_not_in_another_one_s_way(reader: ImageReader) -> None:
    done: list[str] = []

    async def read(tenant: str) -> None:
        await reader.tiles(file_of(Image.new("RGB", (64, 64))), VISION, "low", tenant)
        done.append(tenant)

    await asyncio.gather(*(read("alice") for _ in range(8)), read("bob"))
    assert done.index("bob") == 1


async def test_damaged_files_of_all_kinds_are_answered_and_lose_nobody(reader: ImageReader) -> None:
    dice, answers = random.Random(17), set()
    whole = [file_of(image(), form) for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    for _ in range(200):
        data = bytearray(dice.choice(whole))
        for _ in range(dice.randint(1, 8)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        try:
            size = await reader.size(bytes(data[: dice.randint(1, 2 * len(data))]))
            assert len((await reader.tiles(bytes(data), VISION, "low")).pictures) == 1 or size
            answers.add("taken")
        except InvalidRequestError:
            answers.add("refused")
    assert answers == {"taken", "refused"}


async def test_a_file_that_takes_too_long_or_too_much_ends_its_process_alone() -> None:
    large = file_of(Image.new("RGBA", (6000, 6000)))
    hasty = ImageReader(limit_s=0.001)
    with pytest.raises(InvalidRequestError, match=r"more than 0\.001 s"):
        await hasty.size(large)
    assert not hasty.idle
    small = ImageReader(memory_bytes=300 << 20)
    try:
        assert await small.size(file_of(image())) == (40, 30)
        with pytest.raises(InvalidRequestError, match=r"more memory|ends the process"):
            await small.size(large)
        assert await small.size(file_of(image())) == (40, 30)
    finally:
        small.close()


def test_who_leaves_while_a_process_starts_closes_nothing_that_others_have_opened_since() -> None:
    """On uvloop, as an api runs: libuv ends a process whose descriptors are closed under it."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for turns in range(1, 6):
            runner.run(leave_a_start(turns))


async def leave_a_start(turns: int) -> None:
    starting = asyncio.create_task(CallProcess.start("shared.image_files.process", ["0"]))
    for _ in range(turns):
        await asyncio.sleep(0)
    if not starting.cancel():
        (await starting).kill()
        return
    await asyncio.wait({starting})
    opened = [descriptor for _ in range(4) for descriptor in os.pipe()]
    del starting  # and with it all that the start has held
    gc.collect()
    await asyncio.sleep(0)
    for descriptor in opened:
        os.close(descriptor)


def test_tiles_are_those_of_transformers() -> None:
    module = pytest.importorskip("transformers.models.smolvlm.image_processing_pil_smolvlm")
    theirs = module.SmolVLMImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 32})
    sizes = [(40, 30), (30, 40), (32, 32), (200, 7), (129, 128), (500, 333), (1, 1), (31, 97)]
    for at, (width, height) in enumerate(sizes):
        shown = image(width, height, seed=at)
        cut, found = layout(VISION, width, height, "high"), tiles(file_of(shown), VISION, "high").pictures
        result = theirs([[shown]], return_row_col_info=True)
        assert (result["rows"][0][0], result["cols"][0][0]) == (cut.rows, cut.columns)
        assert cut.tiles == len(found) and cut.tokens == cut.text.count("<image>") == 4 * len(found)
        ours = np.stack([np.frombuffer(tile, np.uint8).reshape(32, 32, 3) for tile in found]).transpose(0, 3, 1, 2)
        assert np.abs((ours / 255 - 0.5) / 0.5 - np.array(result["pixel_values"][0])).max() < 1e-6


def test_tiles_of_lfm2_are_those_of_mlx_vlm() -> None:
    module = pytest.importorskip("mlx_vlm.models.lfm2_vl.processing_lfm2_vl")
    theirs = module.Lfm2VlNumpyImageProcessor(
        tile_size=32, encoder_patch_size=8, min_image_tokens=2, max_image_tokens=4
    )
    vision = VisionSpec(
        "lfm2", "<image>", 9, 32, 0, 4, resample=3, fewest_pixels=512, most_pixels=1024, vector_side=16, tolerance=2.0
    )
    dice, of_one = random.Random(17), 0
    for at in range(60):
        width = dice.randint(4, 150 if at % 2 else 50)
        height = dice.randint(width // 3 + 1, 3 * width)
        shown = image(width, height, seed=at)
        cut, found = layout(vision, width, height, "high"), tiles(file_of(shown), vision, "high")
        result = theirs([shown])
        assert (cut.rows or 1, cut.columns or 1) == (result["image_rows"][0], result["image_cols"][0])
        assert (found.height // 8, found.width // 8) == tuple(result["spatial_shapes"][-1])
        vectors = 4 * cut.rows * cut.columns + found.height * found.width // 256
        assert cut.tokens == cut.text.count("<image>") == vectors
        assert cut.text.count("<|img_row_") == cut.rows * cut.columns == len(found.pictures) - 1
        for picture, patches in zip(found.pictures, result["pixel_values"], strict=True):
            wide, high = (32, 32) if picture is not found.pictures[-1] else (found.width, found.height)
            ours = np.frombuffer(picture, np.uint8).reshape(high // 8, 8, wide // 8, 8, 3).transpose(0, 2, 1, 3, 4)
            packed = ours.reshape(-1, 192) / 255 * 2 - 1
            assert np.abs(packed - patches[: len(packed)]).max() < 1e-6
        assert layout(vision, width, height, "low").tiles == 1
        of_one += cut.tiles == 1
    assert 10 < of_one < 90


def test_pixtrals_picture_is_that_of_mlx_vlm() -> None:
    module = pytest.importorskip("mlx_vlm.models.pixtral.image_processing_pixtral")
    theirs = module.PixtralImageProcessor({"longest_edge": 128}, {"height": 8, "width": 8})
    vision = VisionSpec(
        "pixtral", "[IMG]", 9, 8, 128, 1, mean=tuple(theirs.image_mean), std=tuple(theirs.image_std), resample=3
    )
    for at, (width, height) in enumerate([(40, 30), (8, 8), (129, 128), (500, 333), (1, 1), (31, 97), (900, 10)]):
        shown = image(width, height, seed=at)
        cut, found = layout(vision, width, height, "high"), tiles(file_of(shown), vision, "high")
        result = theirs([shown])
        assert (found.height, found.width) == result["image_sizes"][0]
        assert cut.tokens == cut.text.count("[IMG]") == found.width * found.height // 64
        assert cut.text.count("[IMG_BREAK]") == found.height // 8 - 1 and cut.text.endswith("[IMG][IMG_END]")
        ours = np.frombuffer(found.pictures[0], np.uint8).reshape(found.height, found.width, 3) / 255
        scaled = ((ours - vision.mean) / vision.std).transpose(2, 0, 1)
        assert np.abs(scaled - result["pixel_values"][0]).max() < 1e-5
        assert layout(vision, width, height, "low").tokens <= 16


def test_qwens_picture_is_that_of_transformers() -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    theirs = module.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 3000, "longest_edge": 40_000}, patch_size=14, merge_size=2
    )
    mean, std = tuple(theirs.image_mean), tuple(theirs.image_std)
    vision = VisionSpec("qwen", "<|image_pad|>", 9, 28, 0, 1, True, mean, std, 3, 3000, 40_000)
    for at, (width, height) in enumerate([(40, 30), (28, 28), (129, 128), (500, 333), (1, 1), (31, 97), (900, 10)]):
        shown = image(width, height, seed=at)
        cut, found = layout(vision, width, height, "high"), tiles(file_of(shown), vision, "high")
        result = theirs([shown])
        _, rows, columns = result["image_grid_thw"][0]
        assert (found.height, found.width) == (rows * 14, columns * 14)
        assert cut.tokens == cut.text.count("<|image_pad|>") == rows * columns // 4
        ours = np.frombuffer(found.pictures[0], np.uint8).reshape(found.height, found.width, 3) / 255
        scaled = ((ours - mean) / std).reshape(rows // 2, 2, 14, columns // 2, 2, 14, 3)
        pieces = scaled.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, 14, 14).repeat(2, axis=2)
        assert np.abs(pieces.reshape(rows * columns, -1) - np.array(result["pixel_values"])).max() < 1e-5
        assert layout(vision, width, height, "low").tokens <= cut.tokens
    assert (layout(vision, 500, 333, "high").tokens, layout(vision, 500, 333, "low").tokens) == (40, 2)


def test_one_tile_is_the_same_text_for_every_size() -> None:
    for width, height in product((1, 50, 3000), repeat=2):
        cut = layout(VISION, width, height, "low")
        assert (cut.tiles, cut.tokens, cut.rows) == (1, 4, 0)
        assert cut.text == f"<fake_token_around_image><global-img>{'<image>' * 4}<fake_token_around_image>"


def refs_of(*seeds: int, detail: str = "high") -> tuple[ImageRef, ...]:
    hashes = [hashlib.sha256(bytes([seed])).digest() for seed in seeds]
    return tuple(ImageRef(each, image_key(each, detail, VISION), 2, detail) for each in hashes)  # type: ignore[arg-type]


def test_what_kv_is_found_by_differs_from_the_images_first_place_on() -> None:
    one, other, low = kv_ids(PLAIN.prompt_ids, 9, refs_of(1, 2)), refs_of(1, 3), refs_of(1, 2, detail="low")
    assert one == kv_ids(PLAIN.prompt_ids, 9, refs_of(1, 2)), "it follows from the image"
    assert (one[0], one[-1]) == (1, 2) and len(set(one)) == 6 and max(one[1:5]) < 0
    assert min(one) >= -(2**62)
    assert [a == b for a, b in zip(one, kv_ids(PLAIN.prompt_ids, 9, other), strict=True)] == [1, 1, 1, 0, 0, 1]
    assert [a == b for a, b in zip(one, kv_ids(PLAIN.prompt_ids, 9, low), strict=True)] == [1, 0, 0, 0, 0, 1]
    assert PLAIN.kv_prompt == PLAIN.prompt_ids


def test_a_worker_that_knows_no_images_refuses_a_sequence_with_some(monkeypatch: pytest.MonkeyPatch) -> None:
    seeing = msgspec.structs.replace(PLAIN, images=refs_of(1, 2), image_token=9)
    assert decode_spec(encode(seeing)).images == seeing.images
    monkeypatch.setattr("shared.sequences.SCHEMA", 1)
    packed = encode(msgspec.structs.replace(seeing, schema=2))
    with pytest.raises(IncompatibleVersionError):
        decode_spec(packed)
    assert decode_spec(encode(PLAIN)).schema == 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://pictures.example/a.png", "by https"),
        ("https://other.example/a.png", "does not fetch"),
        ("https://pictures.example:444/a.png", "by https"),
        ("https://me@pictures.example/a.png", "by https"),
        ("https://pictures.example@other.example/a.png", "by https"),
        ("file:///etc/passwd", "by https"),
        ("https://[::1", "not one"),
        ("https://pictures.example/" + "a" * 9000, "more than 8192 characters"),
        ("https://localhost/a.png", "not a public one"),
        ("https://[64:ff9b::7f00:1]/a.png", "not a public one"),
        ("https://[::127.0.0.1]/a.png", "not a public one"),
        ("https://127.0.0.1/a.png", "not a public one"),
        ("https://169.254.169.254/latest", "not a public one"),
        ("https://[::ffff:127.0.0.1]/a.png", "not a public one"),
    ],
)
async def test_nothing_is_fetched_but_from_named_public_hosts(url: str, words: str) -> None:
    hosts = ["Pictures.example", "localhost", "127.0.0.1", "169.254.169.254", "::ffff:127.0.0.1"]
    hosts += ["64:ff9b::7f00:1", "::127.0.0.1"]
    fetch = ImageFetch(hosts, 1000, 5.0, public_address)
    with pytest.raises(InvalidRequestError, match=words):
        await fetch.get(url)
    await fetch.close()


async def test_names_that_no_server_answers_hold_nothing_else_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def look_up(*_: Any, **__: Any) -> list[Any]:
        answered.wait()
        raise OSError("no such name")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", look_up)
        asking = [asyncio.create_task(public_address("silent.test", 443)) for _ in range(64)]
        async with asyncio.timeout(HANG_S):
            assert await asyncio.to_thread(int, "7") == 7, "the threads that all others use are free"
            answered.set()
            answers = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(each, InvalidRequestError) for each in answers)


@pytest.mark.parametrize("length", [0, 1, 1000, 3 << 17, 1_000_001])
def test_data_urls_mean_their_bytes_in_whatever_pieces_they_are_read(length: int) -> None:
    data = random.Random(length).randbytes(length)
    lines = base64.encodebytes(data).decode()
    assert _of_url("data:image/png;base64," + lines) == data
    assert _of_url("DATA:;name=a.png;base64," + base64.b64encode(data).decode()) == data
    for before in ("", "x", "xy"):
        assert _of_url("data:," + before + "".join(f"%{each:02x}" for each in data)) == before.encode() + data


def test_damaged_data_urls_are_refused() -> None:
    piece = "A" * ((1 << 18) - 4)
    for text in ("A", "AA", "AA==AAAA", piece + "AA==AAAA", piece + "A===", "AA\xe9A", "AA*A"):
        with pytest.raises(InvalidRequestError, match="damaged"):
            _of_url("data:;base64," + text)
    for url in ("data:image/png;base64", "data:" + "a" * 5000 + ",", "data:a/b" + ";a=b" * 5000, "data:"):
        with pytest.raises(InvalidRequestError, match="no bytes"):
            _of_url(url)


async def served(monkeypatch: pytest.MonkeyPatch, answer: Callable[[httpx.Request], httpx.Response]) -> bytes:
    """An image fetched from a host that answers so."""
    made = httpx.MockTransport(answer)
    monkeypatch.setattr("api.checks.image_fetch.httpx.AsyncClient", lambda **more: CLIENT(transport=made))

    async def resolve(host: str, port: int) -> str:
        return "93.184.215.14"

    fetch = ImageFetch(["pictures.example", "named.example"], 1000, 5.0, resolve)
    try:
        return await fetch.get("https://pictures.example/a.png")
    finally:
        await fetch.close()


async def test_compressed_answers_are_refused_before_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb, packed = zlib.compress(b"\0" * 10_000_000), {"content-encoding": "deflate"}

    def compressed(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers=packed, stream=httpx.ByteStream(bomb))

    with pytest.raises(InvalidRequestError, match="compressed"):
        await served(monkeypatch, compressed)
    assert await served(monkeypatch, lambda request: httpx.Response(200, stream=httpx.ByteStream(b"abc"))) == b"abc"


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("https://other.example/a.png", "does not fetch"),
        ("https://named.example/a.png", "to another one"),
        ("//other.example/a.png", "does not fetch"),
        ("http://pictures.example/a.png", "by https"),
        ("https://127.0.0.1/a.png", "does not fetch"),
        ("/a.png", "more than 3 times"),
        ("https://pictures.example:8443/a.png", "by https"),
    ],
)
async def test_a_redirect_is_followed_to_the_same_host_alone(
    to: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def moved(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.headers['host']} {request.url.host}")
        return httpx.Response(302, headers={"location": to})

    with pytest.raises(InvalidRequestError, match=words):
        await served(monkeypatch, moved)
    assert set(asked) == {"pictures.example 93.184.215.14"}, "nobody else was asked"


async def test_what_a_host_answers_is_bounded_and_its_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/a.png":
            return httpx.Response(301, headers={"location": "b/c.png"})
        return httpx.Response(200, stream=httpx.ByteStream(b"abc"))

    assert await served(monkeypatch, once) == b"abc"
    with pytest.raises(InvalidRequestError, match="more than 1000 bytes"):
        await served(monkeypatch, lambda request: httpx.Response(200, stream=httpx.ByteStream(b"a" * 1001)))
    with pytest.raises(InvalidRequestError, match="answers 404"):
        await served(monkeypatch, lambda request: httpx.Response(404))
    with pytest.raises(ServiceUnavailableError, match="answers 500"):
        await served(monkeypatch, lambda request: httpx.Response(500))


def test_a_body_may_be_long_by_its_images_alone() -> None:
    url = b'{"type": "image_url", "image_url": {"url": "data:image/png;base64,' + b"A" * 5000 + b'"}}'
    pointer = b'{"type": "image_asset_pointer", "location": "data:image/png;base64,' + b"A" * 5000 + b'"}'
    listed = b'{"role": "user", "images": ["' + b"A" * 5000 + b'", "' + b"B" * 5000 + b'"]}'
    for shown in (url, pointer, listed):
        check_without_images(b'{"messages": [' + shown + b"]}", 200)
    for body in (
        b'{"text": "' + b"x" * 300 + b'"}',
        b'{"text": "data:' + b"x" * 300 + b'"}',
        url + b" " * 200,
        listed + b'"' + b"A" * 300,
    ):
        with pytest.raises(PayloadTooLargeError):
            check_without_images(body, 200)
