"""From an adapter file to evaluated arrays, in a thread of its own: off the engine's hot path.

Files are mlx-lm's `adapters.safetensors` (shared/adapter_files/formats.py has checked them); what depends on this
worker's model is checked here. Of DoRA the gain m / ||W + scale B A|| is computed once, from the base weights.

Invariants. Every array that leaves this thread is evaluated. The thread ends with its streams cleared.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_model.heads.head import Heads, read_heads
from mlx_model.lora.layers import SiteWeights
from mlx_model.lora.stacks import AdaptedModel, AdapterWeights
from mlx_model.networks.network import Network, read_network
from mlx_model.sites import Site
from shared.adapters import AdapterManifest
from shared.errors import AdapterRejectedError, ParallmError

PAUSE_S = 0.001  # after each module: the engine's thread shares the interpreter and the machine with this one

log = logging.getLogger(__name__)

Tensors = dict[str, mx.array]


@dataclass(frozen=True)
class ReadAdapter:
    """One adapter version read into memory."""

    weights: AdapterWeights
    heads: Heads
    network: Network | None = None


OnRead = Callable[[AdapterManifest, ReadAdapter | ParallmError], None]


class AdapterReader:
    """Reads adapters in order of request; `on_read` is called in the reader's thread."""

    def __init__(self, adapted: AdaptedModel, max_rank: int, hidden_size: int, on_read: OnRead) -> None:
        self._adapted = adapted
        self._hidden_size = hidden_size
        self._max_rank = max_rank
        self._on_read = on_read
        self._requests: queue.SimpleQueue[tuple[Path, AdapterManifest] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = False

    def read(self, path: Path, manifest: AdapterManifest) -> None:
        """Queue a version for reading in the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adapter-reader", daemon=True)
            self._thread.start()
        self._requests.put((path, manifest))

    def close(self) -> None:
        """End the thread; what it has not begun is not read any more."""
        self._closing = True
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            while (request := self._requests.get()) is not None and not self._closing:
                self._serve(*request)
        finally:
            gc.collect()
            mx.synchronize()
            mx.clear_streams()

    def _serve(self, path: Path, manifest: AdapterManifest) -> None:
        result: ReadAdapter | ParallmError
        try:
            heads = read_heads(manifest.id, manifest.heads, path, self._hidden_size)
            adapted = self._adapted
            weights = read_adapter(path, manifest, adapted.sites, adapted.dtype, self._max_rank, adapted.elsewhere)
            self._adapted.prepare_kernels(weights)
            described = manifest.network
            network = None if described is None else read_network(manifest.id, described, path)
            result = ReadAdapter(weights, heads, network)
        except ParallmError as error:
            result = error
        except Exception as error:
            log.exception("adapters.read_failed adapter=%s", manifest.id)
            result = AdapterRejectedError(f"{manifest.id} cannot be read: {type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):
            self._on_read(manifest, result)


def read_adapter(
    path: Path,
    manifest: AdapterManifest,
    sites: dict[str, Site],
    dtype: mx.Dtype,
    max_rank: int,
    elsewhere: Collection[str] = (),
) -> AdapterWeights:
    """The weights by site, in the stacks' layout and dtype; AdapterRejectedError when this model cannot take them.

    `elsewhere`: sites of other ranks, which read them there.
    """
    if manifest.rank > max_rank:
        raise AdapterRejectedError(f"{manifest.id} has rank {manifest.rank}; this worker takes up to {max_rank}")
    tensors: Tensors = mx.load(str(path))  # type: ignore[assignment]
    weights: dict[str, SiteWeights] = {}
    for module in manifest.modules:
        if module in elsewhere:
            continue
        site = sites.get(module)
        if site is None:
            raise AdapterRejectedError(f"{manifest.id}: this model has no module {module} to adapt")
        each = _site_weights(manifest, site, tensors, dtype)
        mx.eval([each.a, each.b, *([] if each.gain is None else [each.gain])])  # one by one: DoRA's norms are large
        weights[module] = each
        time.sleep(PAUSE_S)
    return weights


def _site_weights(manifest: AdapterManifest, site: Site, tensors: Tensors, dtype: mx.Dtype) -> SiteWeights:
    a, b = tensors[f"{site.path}.lora_a"], tensors[f"{site.path}.lora_b"]
    if site.kind == "switch":  # mlx-lm: [experts, r, in] and [experts, out, r]
        a, b = a.swapaxes(-1, -2), b.swapaxes(-1, -2)
    lead = (site.experts,) if site.kind == "switch" else ()
    wanted = (*lead, site.inputs, manifest.rank), (*lead, manifest.rank, site.outputs)
    if (a.shape, b.shape) != wanted:
        raise AdapterRejectedError(f"{manifest.id}: {site.path} has shapes {a.shape}, {b.shape}; expected {wanted}")
    a, b = site.held(a, b)
    scaled = b.astype(mx.float32) * manifest.scale
    gain = _gain(manifest, site, a, scaled, tensors[f"{site.path}.m"]) if manifest.kind == "dora" else None
    held = SiteWeights(mx.contiguous(a.astype(dtype)), mx.contiguous(scaled.astype(dtype)), gain)
    if not (mx.isfinite(held.a).all() & mx.isfinite(held.b).all()).item():
        raise AdapterRejectedError(
            f"{manifest.id}: {site.path} is not finite in {dtype}, in which this worker holds it"
        )
    return held


def _gain(manifest: AdapterManifest, site: Site, a: mx.array, scaled_b: mx.array, m: mx.array) -> mx.array:
    """m / ||W + scale B A|| over the rows of W, fp32."""
    if site.cut is not None and site.cut.by == "inputs":
        raise AdapterRejectedError(f"{manifest.id}: {site.path}: DoRA is not supported where ranks divide its inputs")
    if site.cut is not None:
        m = site.cut.part(m, 0)
    if site.kind == "switch" or (site.kind == "embedding" and site.is_quantized):
        raise AdapterRejectedError(f"{manifest.id}: {site.path}: DoRA on {type(site.module).__name__} is not supported")
    delta = a.astype(mx.float32) @ scaled_b  # [in, out], of an embedding [ids, dims]
    weight = site.dense_weight().astype(mx.float32)
    adapted = weight + (delta if site.kind == "embedding" else delta.T)
    return m.astype(mx.float32) / mx.linalg.norm(adapted, axis=1)
