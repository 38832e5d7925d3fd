"""Which images are encoded next, some tiles at a time between decode steps, and the vectors that are kept of them.

Of several ranks, the leading one has the tower. What it has made of an image is not used yet, not even by itself, but
goes to all ranks in pieces, with the facts of turns (`worker/engine/turns.py`): `news` goes with the next, and
`learn` takes it in. So all of them know of each image, and of one that has failed, in the same turn.

Invariants. Lives in the engine's thread. Rows that wait for one image wait for one encoding. A row holds its vectors
itself, so what is forgotten here is only what a later row may want again. Vectors are known by the image's key, which
says all that they depend on (`shared/images/refs.py`); an engine has one model. On several ranks, what is waited for
and what is kept follows from orders and facts alone; how far the tower is, only the leading rank knows.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, KeysView, Sequence
from dataclasses import dataclass, field
from math import inf

import mlx.core as mx

from mlx_model.config import EngineConfig
from mlx_model.vision.families import AnyTower, Tower
from mlx_model.vision.features import EncodedImage, ImageFeatures
from mlx_model.vision.gemma import GemmaTower
from mlx_model.vision.positions import Grid
from mlx_model.vision.qwen import QwenTower
from shared.errors import EngineError, ParallmError, UnsupportedModelError
from shared.images.refs import Picture, image_key
from shared.sequences import ModelCard, SequenceSpec
from worker.engine.album import Album
from worker.engine.messages import VisionStats
from worker.engine.prefixes.parcels import HostArray, as_array, as_bytes, on_host
from worker.engine.turns import ImagePiece

log = logging.getLogger(__name__)

SENT_BYTES = 1 << 20  # of vectors that other ranks are sent between two decode steps
TRIED_AGAIN = 64  # calls until larger numbers of tiles are


@dataclass(eq=False)
class _Encoding:
    """An image that waits or is being encoded."""

    picture: Picture
    tiles: int = 0  # that are done
    done: list[mx.array] = field(default_factory=list)  # their vectors
    layers: Iterator[mx.array] | None = None  # under way, of a tower that goes by these
    looked: bool = False  # whether it is on disk
    made: EncodedImage | None = None  # all of it, which is being sent to the other ranks
    fault: str = ""  # why it has failed, to be sent to them
    known: list[mx.array] = field(default_factory=list)  # vectors that all ranks have

    @property
    def is_over(self) -> bool:
        """True if the tower has finished the image or failed."""
        return self.made is not None or bool(self.fault)

    @property
    def count(self) -> int:
        """Number of vectors that all ranks have."""
        return sum(map(len, self.known))


@dataclass(eq=False)
class Viewing:
    """The images of a row."""

    spec: SequenceSpec
    prompt: Sequence[int]  # in which their ids are negative
    features: ImageFeatures | None = None  # once the row may start
    waits: bool = False  # for some of them to be encoded

    @property
    def keys(self) -> KeysView[bytes]:
        """Keys of the row's images without duplicates; in one order on all ranks, which a set would not have."""
        return dict.fromkeys(image.key for image in self.spec.images).keys()


class TileTimes:
    """How many tiles may be encoded at once. Their number is a power of two: few shapes are compiled.

    A GPU takes for some of them what it takes for one, so twice as many are tried where so many stayed in bounds, and
    again now and then where they did not: the machine may have been busy.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._took: dict[int, tuple[float, ...]] = {}  # the last two by number; the first one of all compiles kernels

    def took(self, tiles: int, seconds: float) -> None:
        """Note the seconds of a call with so many tiles."""
        self._calls += 1
        if self._calls % TRIED_AGAIN == 0:
            self._took = {number: times for number, times in self._took.items() if number <= tiles}
        self._took[tiles] = (*self._took.get(tiles, ()), seconds)[-2:]

    def most(self, tiles: int, seconds: float) -> int:
        """Tiles to encode at once, of `tiles` and within `seconds`; at least one."""
        most = 1
        while 2 * most <= tiles and min(self._took.get(most, (inf,))) <= seconds:
            twice = self._took.get(2 * most, ())
            if len(twice) == 2 and min(twice) > seconds:
                break
            most *= 2
        return most


class Gallery:
    """Encodes and caches images for one engine; without a tower it refuses them."""

    def __init__(
        self, tower: AnyTower | None, config: EngineConfig, card: ModelCard, *, in_thread: bool, by_ranks: bool = False
    ) -> None:
        """`in_thread`: where files are read and written, if there is a folder for them.

        `by_ranks`: an image counts as encoded once all ranks have it; those that follow have no tower.
        """
        self._tower, self._vision, self._by_ranks = tower, card.vision, by_ranks
        self._album: Album | None = None
        if tower is not None and config.disk is not None:
            self._album = Album(config.disk, card, in_thread=in_thread)
        self._limit = config.image_cache_bytes
        self._kept: OrderedDict[bytes, EncodedImage] = OrderedDict()  # by key, least recently used first
        self._waiting: OrderedDict[bytes, _Encoding] = OrderedDict()  # in order of arrival
        self._unkept: set[bytes] = set()  # wanted by rows alone that are not to be cached
        self.wanted: Counter[bytes] = Counter()  # by how many rows that wait
        self.failed: dict[bytes, str] = {}  # of those that are wanted
        self._times: dict[tuple[int, int], TileTimes] = {}  # by a tile's size
        self._bytes = self._hits = self._encoded = 0

    @property
    def busy(self) -> bool:
        """True if an image waits to be encoded."""
        return bool(self._waiting)

    @property
    def stats(self) -> VisionStats:
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
        self.wanted.update(viewing.keys)
        self._waiting.update((key, _Encoding(brought[key])) for key in brought if key in unknown)
        if viewing.spec.cache:
            self._unkept -= viewing.keys
        else:
            self._unkept |= unknown
        if self._album is not None:
            for key in unknown:
                self._album.ask(key)

    def _refusal(self, viewing: Viewing) -> ParallmError | None:
        spec = viewing.spec
        vision = self._vision
        if vision is None:
            return UnsupportedModelError("this model takes no images", param="messages")
        if any(image.key != image_key(image.sha256, image.detail, vision) for image in spec.images):
            return EngineError("the images were prepared for another processor than this worker's")
        if spec.kind != "generate" or spec.sampling.prompt_logprobs is not None:
            return EngineError("with images there are only completions, without log-probabilities of the prompt")
        placeholders = spec.prompt_ids.count(vision.image_token_id)
        if spec.image_token != vision.image_token_id or sum(image.tokens for image in spec.images) != placeholders:
            return EngineError("the prompt has not as many placeholders as its images have vectors")
        return EngineError("a prompt cannot end with an image") if viewing.prompt[-1] < 0 else None

    def ready(self, viewing: Viewing | None) -> bool:
        """True if the row's images are encoded; EngineError if one of them could not be."""
        if viewing is None or viewing.features is not None:
            return True
        images = viewing.spec.images
        if failed := next((self.failed[key] for key in viewing.keys if key in self.failed), None):
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
            self.wanted[key] -= 1
            if self.wanted[key] <= 0:
                del self.wanted[key]
                self.failed.pop(key, None)
                if self._waiting.pop(key, None) is not None and self._album is not None:
                    self._album.take(key)
            if key in self._unkept and not self.wanted[key]:
                self._unkept.discard(key)
                self._forget(key)
            if key in self._kept:
                self._kept.move_to_end(key)
        self._shrink()

    def work(self, seconds: float) -> None:
        """Encode for about so long, a tile at least; an image of which one fails ends the rows that wait for it."""
        until = time.perf_counter() + seconds
        while self._tower is not None and (key := self._next()) is not None:
            encoding = self._waiting[key]
            try:
                self._advance(self._tower, key, encoding, until)
            except Exception as error:
                log.exception("engine.image_failed")
                encoding.fault = f"the image could not be encoded: {type(error).__name__}: {error}"
                if not self._by_ranks:
                    self._fail(key, encoding.fault)
            if time.perf_counter() > until:
                return

    def news(self, times: int) -> tuple[ImagePiece, ...]:
        """Pieces to send to the other ranks in the next turn: `times` the usual bytes, at least one vector."""
        pieces: list[ImagePiece] = []
        most = SENT_BYTES * times
        for key, encoding in self._waiting.items():
            if most <= 0:
                break
            if encoding.fault:
                pieces.append(ImagePiece(key, fault=encoding.fault))
            elif encoding.made is not None:
                pieces.append(_piece(key, encoding.made, encoding.count, most))
                most -= len(pieces[-1].vectors)
        return tuple(pieces)

    def learn(self, pieces: Sequence[ImagePiece]) -> None:
        """Take in pieces that all ranks get; those of an image that no row waits for are dropped."""
        for piece in pieces:
            encoding = self._waiting.get(piece.key)
            if encoding is None:
                continue
            if piece.fault:
                self._fail(piece.key, piece.fault)
            elif piece.start == encoding.count:  # else it was given up amid its pieces, and is wanted anew
                encoding.known.append(_vectors(piece))
                if encoding.count == piece.total:
                    vectors_TH = mx.concatenate(encoding.known)
                    mx.eval(vectors_TH)
                    self._take(
                        piece.key, EncodedImage(vectors_TH, Grid(piece.rows, piece.columns) if piece.rows else None)
                    )

    def _next(self) -> bytes | None:
        """The image that has waited longest, but for those that may come from disk."""
        to_do = (key for key, encoding in self._waiting.items() if not encoding.is_over)
        return next((key for key in to_do if self._album is None or not self._album.waits(key)), None)

    def _advance(self, tower: AnyTower, key: bytes, encoding: _Encoding, until: float) -> None:
        if self._album is not None and not encoding.looked:
            encoding.looked = True
            vectors_TH = self._album.take(key)
            if vectors_TH is not None:
                size = encoding.picture.width, encoding.picture.height
                self._hits += 1
                self._take(key, EncodedImage(vectors_TH, None if isinstance(tower, Tower) else tower.grid(*size)))
                return
        if isinstance(tower, Tower):
            seen = self._tiles(tower, encoding, until)
        else:
            seen = self._layers(tower, encoding, until)
        if seen is None:
            return
        mx.eval(seen.vectors_TH)
        self._encoded += 1
        if self._album is not None and key not in self._unkept:
            self._album.keep(key, seen.vectors_TH)
        if self._by_ranks:
            encoding.made = seen
        else:
            self._take(key, seen)

    def _take(self, key: bytes, seen: EncodedImage) -> None:
        del self._waiting[key]
        self._kept[key] = seen
        self._bytes += seen.vectors_TH.nbytes
        self._shrink()

    def _fail(self, key: bytes, fault: str) -> None:
        self._waiting.pop(key, None)
        self.failed[key] = fault

    def end(self) -> None:
        """End what runs in threads."""
        if self._album is not None:
            self._album.close()

    def _layers(self, tower: QwenTower | GemmaTower, encoding: _Encoding, until: float) -> EncodedImage | None:
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
        return EncodedImage(vectors_TH, tower.grid(picture.width, picture.height))

    def _tiles(self, tower: Tower, encoding: _Encoding, until: float) -> EncodedImage | None:
        """The image, once its last tile is through."""
        picture, began = encoding.picture, time.perf_counter()
        left = picture.tiles[encoding.tiles :]
        size = picture.width, picture.height
        square = tower.vision.tile, tower.vision.tile
        if len(left) > 1 and size != square:
            size, alike = square, left[:-1]
        else:
            alike = left
        times = self._times.setdefault(size, TileTimes())
        chosen = alike[: times.most(len(alike), until - began)]
        vectors_NTH = tower.encode(chosen, *size)
        mx.eval(vectors_NTH)
        times.took(len(chosen), time.perf_counter() - began)
        encoding.done.append(vectors_NTH.reshape(-1, vectors_NTH.shape[-1]))
        encoding.tiles += len(chosen)
        return None if len(chosen) < len(left) else EncodedImage(mx.concatenate(encoding.done))

    def _shrink(self) -> None:
        """Forget the images used longest ago, but for those that a row still waits for."""
        for key in list(self._kept):
            if self._bytes <= self._limit:
                return
            if not self.wanted[key]:
                self._forget(key)

    def _forget(self, key: bytes) -> None:
        if (seen := self._kept.pop(key, None)) is not None:
            self._bytes -= seen.vectors_TH.nbytes


def _piece(key: bytes, made: EncodedImage, start: int, most: int) -> ImagePiece:
    """The next vectors of an image: about so many bytes."""
    total, width = made.vectors_TH.shape
    end = start + max(1, most * total // made.vectors_TH.nbytes)
    part_TH = made.vectors_TH[start:end]
    flat = as_bytes(part_TH)
    mx.eval(flat)
    host = on_host(part_TH, flat)
    rows, columns = made.grid or (0, 0)
    return ImagePiece(key, start, total, width, host.dtype, bytes(host.data), rows, columns)


def _vectors(piece: ImagePiece) -> mx.array:
    """The piece's vectors, [T, H]."""
    return as_array(HostArray(piece.dtype, (-1, piece.width), memoryview(piece.vectors)))
