"""A prompt's blocks and their keys.

A block's key is a chain hash: of the key before it and of its own ids; the first one starts from the base model's hash
and the adapter version. So an equal key means an equal prefix, computed with equal weights.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence


class BlockKeys:
    """Keys of blocks for one base model and block size."""

    def __init__(self, base_sha256: str, block_size: int) -> None:
        self._base = base_sha256
        self._block_size = block_size

    def root(self, version: str) -> bytes:
        """The key before the first block."""
        return f"{self._base} {self._block_size} {version}".encode()

    def chain(self, ids: Sequence[int], version: str) -> Iterator[bytes]:
        """The keys of all whole blocks."""
        key = self.root(version)
        packed = array("q", ids)
        for start in range(0, len(packed) - self._block_size + 1, self._block_size):
            block = packed[start : start + self._block_size].tobytes()
            key = hashlib.blake2b(key + block, digest_size=16).digest()
            yield key
