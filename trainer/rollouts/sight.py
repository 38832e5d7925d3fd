"""What a policy sees: the vectors of images, computed by the same frozen tower as in a worker.

Tiles come from the event loop, vectors are made and read in the MLX thread. Both are kept by an image's key, those used
longest ago go first; an image is shown anew with each group that has it.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from threading import Lock

import mlx.core as mx

from mlx_model.loader import LoadedModel
from mlx_model.vision.families import AnyTower, Tower
from mlx_model.vision.features import EncodedImage
from shared.errors import EngineError
from shared.images.refs import ImageRef, Picture

TILE_BYTES = 1 << 30  # far more than the groups that are under way have, unless their images are very large
VECTOR_BYTES = 256 << 20


class Sight:
    """Image vectors of one model, computed by its vision tower and cached."""

    def __init__(self, tower: AnyTower, tile_bytes: int = TILE_BYTES, vector_bytes: int = VECTOR_BYTES) -> None:
        self.vision = tower.vision
        self.bring: Callable[[bytes], Picture] | None = None  # asked for tiles that are not there, in the MLX thread
        self._tower = tower
        self._most = tile_bytes, vector_bytes
        self._lock = Lock()
        self._pictures: OrderedDict[bytes, Picture] = OrderedDict()  # least recently used first, as the next
        self._vectors: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._tile_bytes = self._vector_bytes = 0

    def knows(self, key: bytes) -> bool:
        """True if an image's tiles are here; they then count as used now."""
        with self._lock:
            if key in self._pictures:
                self._pictures.move_to_end(key)
            return key in self._pictures

    def show(self, picture: Picture) -> None:
        """Tiles of an image; its vectors are made when they are asked for."""
        with self._lock:
            if picture.key not in self._pictures:
                self._pictures[picture.key] = picture
                self._tile_bytes += _size(picture)
            while self._tile_bytes > self._most[0] and len(self._pictures) > 1:
                self._tile_bytes -= _size(self._pictures.popitem(last=False)[1])

    def picture(self, key: bytes) -> Picture:
        """The tiles of an image; EngineError when they are not there any more."""
        with self._lock:
            found = self._pictures.get(key)
        if found is None and self.bring is not None:
            found = self.bring(key)
            self.show(found)
        if found is None:
            raise EngineError(
                f"the images under way have more than {self._most[0]} bytes of tiles: the first have gone"
            )
        return found

    def seen(self, keys: Sequence[bytes]) -> list[EncodedImage]:
        """Vectors of these images; EngineError for one whose tiles are not here."""
        return [self._of(key) for key in keys]

    def rows(
        self, images_B: Sequence[Sequence[ImageRef]], pictures: Mapping[bytes, Picture]
    ) -> Generator[None, None, list[list[EncodedImage]]]:
        """Vectors of the images of each row, whose tiles come along; yields after every image.

        EngineError for one that has not as many vectors as its row has places.
        """
        found: list[list[EncodedImage]] = [[] for _ in images_B]
        for seen, images in zip(found, images_B, strict=True):
            for image in images:
                if image.key in pictures:
                    self.show(pictures[image.key])
                seen += self.seen([image.key])
                if len(seen[-1].vectors_TH) != image.tokens:
                    raise EngineError("an image has not as many vectors as there are places for it")
                yield
        return found

    def _of(self, key: bytes) -> EncodedImage:
        if key in self._vectors:
            self._vectors.move_to_end(key)
            return self._vectors[key]
        made = _encoded(self._tower, self.picture(key))
        self._vectors[key] = made
        self._vector_bytes += made.vectors_TH.nbytes
        while self._vector_bytes > self._most[1] and len(self._vectors) > 1:
            self._vector_bytes -= self._vectors.popitem(last=False)[1].vectors_TH.nbytes
        return made


def sight_of(loaded: LoadedModel, tile_bytes: int = TILE_BYTES) -> Sight | None:
    """None without a tower, and where ranks divide the model, of which only the leading one has it."""
    return None if loaded.tower is None or loaded.ranks is not None else Sight(loaded.tower, tile_bytes)


def _encoded(tower: AnyTower, picture: Picture) -> EncodedImage:
    """Vectors by pieces of the image, so that no more memory is used than in a worker."""
    size, pieces = (picture.width, picture.height), list[mx.array]()
    if isinstance(tower, Tower):
        square = tower.vision.tile, tower.vision.tile
        *tiles, last = picture.tiles  # of one, the last may be of another size than the others
        pieces = [_whole(tower.encode([tile], *square)[0]) for tile in tiles]
        pieces.append(_whole(tower.encode([last], *size)[0]))
        return EncodedImage(_whole(mx.concatenate(pieces)))
    for piece in tower.layers(picture.tiles[0], *size):
        pieces = [_whole(piece)]
    return EncodedImage(pieces[0], tower.grid(*size))


def _whole(array: mx.array) -> mx.array:
    mx.eval(array)
    return array


def _size(picture: Picture) -> int:
    return sum(map(len, picture.tiles))
