"""What a policy sees: the vectors of images, computed by the same frozen tower as in a worker.

Tiles come from the event loop, vectors are made and read in the MLX thread. Both are kept by an image's key, those used
longest ago go first; an image is shown anew with each group that has it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

import mlx.core as mx

from shared.errors import EngineError
from worker.engine.messages import Picture
from worker.engine.vision.families import Tower

TILE_BYTES = 1 << 30  # far more than the groups that are under way have, unless their images are very large
VECTOR_BYTES = 256 << 20


class Sight:
    """Of one model."""

    def __init__(self, tower: Tower, tile_bytes: int = TILE_BYTES, vector_bytes: int = VECTOR_BYTES) -> None:
        self.vision = tower.vision
        self._tower = tower
        self._most = tile_bytes, vector_bytes
        self._lock = Lock()
        self._pictures: OrderedDict[bytes, Picture] = OrderedDict()  # least recently used first, as the next
        self._vectors: OrderedDict[bytes, mx.array] = OrderedDict()
        self._tile_bytes = self._vector_bytes = 0

    def knows(self, key: bytes) -> bool:
        """Whether an image's tiles are there; they are used now."""
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

    def vectors(self, keys: Sequence[bytes]) -> mx.array:
        """Vectors [T, H] of these images, one after another; EngineError for one whose tiles are not there."""
        return mx.concatenate([self._of(key) for key in keys])

    def _of(self, key: bytes) -> mx.array:
        if key in self._vectors:
            self._vectors.move_to_end(key)
            return self._vectors[key]
        with self._lock:
            picture = self._pictures.get(key)
        if picture is None:
            raise EngineError(
                f"the images under way have more than {self._most[0]} bytes of tiles: the first have gone"
            )
        seen = [self._tower.encode([tile], picture.width, picture.height)[0] for tile in picture.tiles]
        made = mx.concatenate(seen)
        mx.eval(made)
        self._vectors[key] = made
        self._vector_bytes += made.nbytes
        while self._vector_bytes > self._most[1] and len(self._vectors) > 1:
            self._vector_bytes -= self._vectors.popitem(last=False)[1].nbytes
        return made


def sight_of(tower: Any) -> Sight | None:
    """None without a tower, and for one whose family places its vectors in more than one dimension (Qwen-VL)."""
    return Sight(tower) if isinstance(tower, Tower) else None


def _size(picture: Picture) -> int:
    return sum(map(len, picture.tiles))
