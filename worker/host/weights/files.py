"""Which files of a model one host gives to another, and the messages in which they are asked for.

A folder's own files of known kinds: configuration, weights, tokenizer, templates; no code, nothing in folders below,
and nothing that a link leads to elsewhere, but for the links of the hub's cache to its own blobs. The taker believes no
name: it checks each before anything is written.
"""

import re
from pathlib import Path

import msgspec

from shared.wire import PeerError

MAGIC = b"PLMWT001"
PIECE_BYTES = 4 << 20  # of a file, in one frame
MOST_FILES = 1000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.(json|jsonl|safetensors|model|tiktoken|txt|jinja)")
SHA256 = re.compile(r"[0-9a-f]{64}")


class WeightsRequest(msgspec.Struct, frozen=True):
    """Asks for the files of a model."""

    model: str  # its name in the catalogue
    sha256: str  # `base_sha256` of its card


class WeightFiles(msgspec.Struct, frozen=True):
    """Answers with the files that there are."""

    sizes: dict[str, int] = {}  # name -> bytes
    refusal: str = ""  # why it gives nothing

    def checked(self) -> "WeightFiles":
        """The files themselves; PeerError where they cannot be those of a model."""
        wrong = next((name for name in self.sizes if not NAME.fullmatch(name)), None)
        if wrong is not None:
            raise PeerError(f"it offers a file {wrong[:80]!r}, which is none of a model's")
        if not 0 < len(self.sizes) <= MOST_FILES or "config.json" not in self.sizes or min(self.sizes.values()) < 0:
            raise PeerError(f"it offers {len(self.sizes)} files, which are no model's")
        return self


class SendFile(msgspec.Struct, frozen=True):
    """Asks for one of these files, from a byte on; frames with its bytes follow."""

    name: str
    begin: int


def files_of(folder: Path) -> dict[str, Path]:
    """Files of a model's folder that may be given, by name."""
    root = folder.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    found = {}
    for path in sorted(root.iterdir()):
        target = path.resolve()
        if NAME.fullmatch(path.name) and target.is_file() and any(target.is_relative_to(each) for each in roots):
            found[path.name] = target
    return found
