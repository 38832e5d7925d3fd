"""Which images are encoded next, some tiles at a time between decode steps, and the vectors that are kept of them.

Invariants. Lives in the engine's thread. Rows that wait for one image wait for one encoding. A row holds its vectors
itself, so what is forgotten here is only what a later row may want again. Vectors are known by the image's key, which
says all that they depend on (`shared/images/refs.py`); an engine has one model.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import mlx.core as mx

from shared.errors import EngineError, ParallmError, UnsupportedModelError
from shared.images.refs import image_key
from shared.sequences import SequenceSpec
from worker.engine.messages import Picture, VisionStats
from worker.engine.vision.families import Tower
from worker.engine.vision.features import ImageFeatures, Seen
from worker.engine.vision.qwen import QwenTower

log = logging.getLogger(__name__)

TRIED_AGAIN = 64  # calls until larger numbers of tiles are


@dataclass(eq=False)
class _Encoding:
    """An image under way."""

    picture: Picture
    tiles: int = 0  # that are done
    done: list[mx.array] = field(default_factory=list)  # their vectors
    layers: Iterator[mx.array] | None = None  # under way, of a tower that goes by these


@dataclass(eq=False)
class Viewing:
    """The images of a row."""

    spec: SequenceSpec
    prompt: Sequence[int]  # in which their ids are negative
    features: ImageFeatures | None = None  # once the row may start
    waits: bool = False  # for some of them to be encoded

    @property
    def keys(self) -> set[bytes]:
        """Of its images."""
        return {image.key for image in self.spec.images}


class TileTimes:
    """How many tiles may be encoded at once. Their number is a power of two: few shapes are compiled.

    A GPU takes for some of them what it takes for one, so twice as many are tried where so many stayed in bounds, and
    again now and then where they did not: the machine may have been busy.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._took: dict[int, tuple[float, ...]] = {}  # the last two by number; the first one of all compiles kernels

    def took(self, tiles: int, seconds: float) -> None:
        """So many at once."""
        self._calls += 1
        if self._calls % TRIED_AGAIN == 0:
            self._took = {number: times for number, times in self._took.items() if number <= tiles}
        self._took[tiles] = (*self._took.get(tiles, ()), seconds)[-2:]

    def most(self, tiles: int, seconds: float) -> int:
        """Of so many, in so much time: one at least."""
        most = 1
        while 2 * most <= tiles and min(self._took.get(most, (inf,))) <= seconds:
            twice = self._took.get(2 * most, ())
            if len(twice) == 2 and min(twice) > seconds:
                break
            most *= 2
        return most


class Gallery:
    """Of one engine; without a tower it takes no images."""

    def __init__(self, tower: Tower | QwenTower | None, limit_bytes: int) -> None:
        self._tower = tower
        self._limit = limit_bytes
        self._kept: OrderedDict[bytes, Seen] = OrderedDict()  # by key, least recently used first
        self._waiting: OrderedDict[bytes, _Encoding] = OrderedDict()  # in order of arrival
        self._wanted: Counter[bytes] = Counter()  # by how many rows that wait
        self._failed: dict[bytes, str] = {}  # of those that are wanted
        self._times: dict[tuple[int, int], TileTimes] = {}  # by a tile's size
        self._bytes = self._hits = self._encoded = 0

    @property
    def busy(self) -> bool:
        """Whether an image waits to be encoded."""
        return bool(self._waiting)

    @property
    def stats(self) -> VisionStats:
        """Counters and size."""
        return VisionStats(encoded=self._encoded, hits=self._hits, bytes=self._bytes)

    def check(self, viewing: Viewing | None, pictures: Sequence[Picture]) -> None:
        """A ParallmError when a row's images cannot be seen here, or did not come with it."""
        if viewing is None:
            return
        refusal = self._refusal(viewing)
        if refusal is not None:
            raise refusal
        if viewing.keys - self._kept.keys() - self._waiting.keys() - {picture.key for picture in pictures}:
            raise EngineError("an image of this sequence did not come with it")

    def open(self, viewing: Viewing | None, pictures: Sequence[Picture]) -> None:
        """Begin to encode what is not known of a row's images, which have been checked."""
        if viewing is None:
            return
        brought = {picture.key: picture for picture in pictures}
        unknown = viewing.keys - self._kept.keys() - self._waiting.keys()
        viewing.waits = True
        self._hits += len(viewing.keys) - len(unknown)
        self._wanted.update(viewing.keys)
        self._waiting.update((key, _Encoding(brought[key])) for key in brought if key in unknown)

    def _refusal(self, viewing: Viewing) -> ParallmError | None:
        spec = viewing.spec
        if self._tower is None:
            return UnsupportedModelError("this model takes no images", param="messages")
        vision = self._tower.vision
        if any(image.key != image_key(image.sha256, image.detail, vision) for image in spec.images):
            return EngineError("the images were prepared for another processor than this worker's")
        if spec.kind != "generate" or spec.sampling.prompt_logprobs is not None:
            return EngineError("with images there are only completions, without log-probabilities of the prompt")
        placeholders = spec.prompt_ids.count(vision.image_token_id)
        if spec.image_token != vision.image_token_id or sum(image.tokens for image in spec.images) != placeholders:
            return EngineError("the prompt has not as many placeholders as its images have vectors")
        return EngineError("a prompt cannot end with an image") if viewing.prompt[-1] < 0 else None

    def ready(self, viewing: Viewing | None) -> bool:
        """Whether a row has what it is fed with; EngineError when one of its images could not be encoded."""
        if viewing is None or viewing.features is not None:
            return True
        images = viewing.spec.images
        if failed := next((self._failed[key] for key in viewing.keys if key in self._failed), None):
            raise EngineError(failed)
        if not viewing.keys <= self._kept.keys():
            return False
        found = [self._kept[image.key] for image in images]
        if any(len(each.vectors_TH) != image.tokens for each, image in zip(found, images, strict=True)):
            raise EngineError("an image has not as many vectors as the prompt has placeholders for it")
        viewing.features = ImageFeatures(viewing.prompt, found)
        self.close(viewing)
        return True

    def close(self, viewing: Viewing | None) -> None:
        """The row waits for its images no more: it has them, or leaves."""
        if viewing is None or not viewing.waits:
            return
        viewing.waits = False
        for key in viewing.keys:
            self._wanted[key] -= 1
            if self._wanted[key] <= 0:
                del self._wanted[key]
                self._failed.pop(key, None)
                self._waiting.pop(key, None)
            if key in self._kept:
                self._kept.move_to_end(key)
        self._shrink()

    def work(self, seconds: float) -> None:
        """Encode for about so long, a tile at least; an image of which one fails is told to those that wait for it."""
        until = time.perf_counter() + seconds
        while self._waiting:
            key, encoding = next(iter(self._waiting.items()))
            try:
                self._advance(key, encoding, until)
            except Exception as error:
                log.exception("engine.image_failed")
                self._waiting.pop(key, None)
                self._failed[key] = f"the image could not be encoded: {type(error).__name__}: {error}"
            if time.perf_counter() > until:
                return

    def _advance(self, key: bytes, encoding: _Encoding, until: float) -> None:
        assert self._tower is not None, "images are refused without a tower"
        if isinstance(self._tower, QwenTower):
            seen = self._layers(self._tower, encoding, until)
        else:
            seen = self._tiles(self._tower, encoding, until)
        if seen is None:
            return
        mx.eval(seen.vectors_TH)
        del self._waiting[key]
        self._kept[key] = seen
        self._bytes += seen.vectors_TH.nbytes
        self._encoded += 1
        self._shrink()

    def _layers(self, tower: QwenTower, encoding: _Encoding, until: float) -> Seen | None:
        """The image, once its last layer is through."""
        picture = encoding.picture
        if encoding.layers is None:
            encoding.layers = tower.layers(picture.tiles[0], picture.width, picture.height)
        for latest in encoding.layers:
            encoding.done = [latest]
            mx.eval(latest)
            if time.perf_counter() > until:
                return None
        (vectors_TH,) = encoding.done
        return Seen(vectors_TH, tower.grid(picture.width, picture.height))

    def _tiles(self, tower: Tower, encoding: _Encoding, until: float) -> Seen | None:
        """The image, once its last tile is through."""
        picture, began = encoding.picture, time.perf_counter()
        times = self._times.setdefault((picture.width, picture.height), TileTimes())
        left = picture.tiles[encoding.tiles :]
        chosen = left[: times.most(len(left), until - began)]
        vectors_NTH = tower.encode(chosen, picture.width, picture.height)
        mx.eval(vectors_NTH)
        times.took(len(chosen), time.perf_counter() - began)
        encoding.done.append(vectors_NTH.reshape(-1, vectors_NTH.shape[-1]))
        encoding.tiles += len(chosen)
        return None if len(chosen) < len(left) else Seen(mx.concatenate(encoding.done))

    def _shrink(self) -> None:
        """Forget the images used longest ago, but for those that a row still waits for."""
        for key in list(self._kept):
            if self._bytes <= self._limit:
                return
            if not self._wanted[key]:
                self._bytes -= self._kept.pop(key).vectors_TH.nbytes
