"""A base's weights with an adapter in them.

What a worker computes with the adapter beside the base is g * (W x + scale B A x) + bias, where g is 1 for LoRA and
m / ||W + scale B A|| for DoRA (arXiv 2106.09685, 2402.09353). So the merged weight is g * (W + scale B A), computed in
fp32 and rounded once to the dtype of W. A packed weight is unpacked, merged, and packed again with the same group size,
bits and mode; that rounds to other values than W's, also where the adapter changes little.

mlx-lm's layers can fuse, too; they round the adapter's part to the dtype of W before the sum, and know no DoRA on
experts or packed embeddings. A and B are read here by what reads them for serving, so that both mean the same.

Nothing is computed before it is written: a merged weight is an operation on the base's, which is read when it is due.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx_lm.utils

from shared.errors import SetupError
from worker.engine.lora.layers import SiteWeights
from worker.engine.model.sites import Site

_SECOND_SCALE = "global_scale"  # of NVFP4, beside the scales of groups: mx.quantize would not give it back


def dequantize(model: Any) -> None:
    """Unpack all packed weights; SetupError for a kind of packing that mlx-lm cannot unpack."""
    packed = {path: module for path, module in model.named_modules() if "scales" in module}
    if not packed:
        raise SetupError("the base is not quantised: leave out --dequantize")
    for path, module in packed.items():
        _check_scales(path, module)
    mlx_lm.utils.dequantize_model(model)
    if left := next((path for path, module in model.named_modules() if "scales" in module), ""):
        raise SetupError(f"{left}: mlx-lm cannot dequantise a {type(packed[left]).__name__}")


def fuse(model: Any, sites: Mapping[str, Site], adapter: Mapping[str, SiteWeights]) -> None:
    """Put the merged weights in place of the base's; SetupError when a module cannot take them."""
    paths_of = Counter(id(module) for _, module in model.named_modules())
    for path, weights in adapter.items():
        site = sites[path]
        if paths_of[id(site.module)] > 1:
            raise SetupError(f"{path}: the model uses this module in several places, and the adapter is of one of them")
        if weights.gain is not None and not mx.isfinite(weights.gain).all().item():
            raise SetupError(f"{path}: m / ||W + scale B A|| of this DoRA is not finite")
        _put(site, _merged(site, weights))


def _merged(site: Site, weights: SiteWeights) -> mx.array:
    base = site.dense_weight()
    delta = weights.a.astype(mx.float32) @ weights.b.astype(mx.float32)  # [in, out]; of an embedding [ids, dims]
    if site.kind != "embedding":
        delta = delta.swapaxes(-1, -2)
    merged = base.astype(mx.float32) + delta
    if weights.gain is not None:
        merged = merged * weights.gain[:, None]
    return merged.astype(base.dtype)


def _put(site: Site, weight: mx.array) -> None:
    module = site.module
    if not site.is_quantized:
        module.weight = weight
        return
    _check_scales(site.path, module)
    module.weight, module.scales, *biases = mx.quantize(
        weight, group_size=module.group_size, bits=module.bits, mode=module.mode
    )
    if biases:
        module.biases = biases[0]


def _check_scales(path: str, module: Any) -> None:
    if module.get(_SECOND_SCALE) is not None:
        raise SetupError(f"{path}: NVFP4 with a scale for the whole tensor cannot be merged")
