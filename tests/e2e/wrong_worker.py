"""A real worker process whose tokens are wrong from its start: `python -m tests.e2e.wrong_worker FAULT ARGUMENTS`.

FAULT is one of FAULTS; the arguments are those of mlx_parallm_worker. The files that it reads are right, so nothing but
its tokens shows the fault.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mlx_model import fast_blas

fast_blas.install()

import mlx.core as mx  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402

from mlx_model.loader import LoadedModel, load_model  # noqa: E402
from shared.adapters import AdapterManifest  # noqa: E402
from shared.redis.adapters.catalog import AdapterCatalog  # noqa: E402
from worker import __main__ as command  # noqa: E402
from worker.adapters.cache import DiskCache  # noqa: E402
from worker.engine import build  # noqa: E402

EXPONENTS = {mx.float32: (mx.uint32, 23, 8), mx.float16: (mx.uint16, 10, 5), mx.bfloat16: (mx.uint16, 7, 8)}


def flip_one_bit() -> None:
    """One bit of the largest weight of a layer in the middle is set: of its exponent, so that it is 2 to 2^16 times."""

    def loaded(*arguments: Any) -> LoadedModel:
        model = load_model(*arguments)
        parameters: list[tuple[str, mx.array]] = tree_flatten(model.model.parameters())
        names = [name for name, _ in parameters if name.endswith("down_proj.weight")]
        name = names[len(names) // 2]
        weight = dict(parameters)[name]
        kind, lowest, bits = EXPONENTS[weight.dtype]
        flat = weight.reshape(-1).view(kind)
        largest = int(mx.argmax(mx.abs(weight.reshape(-1))))
        old = int(flat[largest])
        bit = next(bit for bit in range(lowest + bits - 2, 0, -1) if not old >> bit & 1)
        flat[largest] = old | 1 << bit
        model.model.load_weights([(name, flat.view(weight.dtype).reshape(weight.shape))], strict=False)
        return model

    build.load_model = loaded


def shift_kv() -> None:
    """The KV of every generated token is computed for one position too far, as if a row had one more before it."""
    rope = mx.fast.rope

    def shifted(x: mx.array, *arguments: Any, offset: Any, **options: Any) -> mx.array:
        return rope(x, *arguments, offset=offset + 1 if x.shape[-2] == 1 else offset, **options)

    mx.fast.rope = shifted  # type: ignore[assignment]


def load_first_versions() -> None:
    """Of each adapter version 1 is read, whichever is asked for."""
    hold = DiskCache.hold

    @asynccontextmanager
    async def held(self: DiskCache, catalog: AdapterCatalog, manifest: AdapterManifest) -> AsyncIterator[Path]:
        async with hold(self, catalog, await catalog.manifest(manifest.name, 1)) as path:
            yield path

    DiskCache.hold = held  # type: ignore[method-assign, assignment]


FAULTS = {"weight": flip_one_bit, "kv": shift_kv, "adapter": load_first_versions}

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    sys.exit(command.main())
