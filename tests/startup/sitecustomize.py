"""For every Python process that the tests start (tests/conftest.py): it imports no more than it needs.

While it is imported, transformers reads the 3,000 source files of its models, twice, to learn which name stands in
which of them. That is half of what the start of a worker or trainer costs, and the tests start more than a hundred.
The answer depends on its version alone, so it is kept in a file. And structlog and httpx find no rich, which one would
draw tracebacks with that none of our logs has, and the other its own command line: an eighth of some processes' start.
Nor does redis find a library of ciphers, with which it would read tokens of a cloud's users: a tenth of most of them.
Nothing else of the four, and nothing of ours, is other than in a user's process.
"""

import contextlib
import marshal
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

SCANS = "transformers.utils.import_utils"


class _Around:
    """Loads a module with another loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]


class _Remembering(_Around):
    """Loads the module that scans, and puts what has been kept in front of its scan."""

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        scan = module.define_import_structure

        def remembered(path: Any, prefix: str | None = None) -> Any:
            models = Path(path)
            if models.name == "__init__.py":
                models = models.parent
            if models.name != "models":
                return scan(path, prefix)
            kept = Path(os.environ["PARALLM_TEST_SCANS"], f"{prefix or 'plain'}-{models.stat().st_mtime_ns}")
            with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
                return marshal.loads(kept.read_bytes())
            found = scan(path, prefix)
            _write(kept, marshal.dumps(found))
            return found

        module.define_import_structure = remembered


class _Plain(_Around):
    """Loads a module without rich and the ciphers, unless somebody has them already: redis looks for their package."""

    def exec_module(self, module: ModuleType) -> None:
        hidden = {"rich", "cryptography.hazmat", "cryptography.x509"} - sys.modules.keys()
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
        try:
            self._loader.exec_module(module)
        finally:
            for name in hidden:
                del sys.modules[name]


LOADERS = {SCANS: _Remembering, "structlog": _Plain, "httpx": _Plain, "jwt.algorithms": _Plain}


class _Finder:
    """Finds those four modules."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in LOADERS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = LOADERS[name](spec.loader)
        return spec


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: several processes may write it at once."""
    import tempfile  # only the first one needs it

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


if "PARALLM_TEST_SCANS" in os.environ:
    sys.meta_path.insert(0, _Finder)
