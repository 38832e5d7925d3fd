"""What mlx_model/batching.py says is assumed of a model, held by a model of each kind of KV."""

import mlx.core as mx
import pytest

from mlx_model.kv.kinds import copies, keep_rows, kind_of, leaves
from tests.engine.conftest import prompt_of
from tests.engine.kv_models import BOUNDED, CONFIGS, QUANTISED, WINDOW, Model

LENGTHS = (WINDOW + 7, 1, 9)  # the first does not fit a window


def is_same(one: mx.array, other: mx.array, quantised: bool) -> bool:
    close = 2e-2 if quantised else 1e-3  # scores over packed KV are summed in another order
    return bool(mx.allclose(one, other, rtol=0, atol=close * float(mx.max(mx.abs(other)).item())))


@pytest.mark.parametrize("name", [*sorted(CONFIGS), QUANTISED[0], BOUNDED[0]])
def test_rows_in_pieces_with_padding_compute_what_each_computes_alone(name: str, model_of: Model) -> None:
    loaded, quantised = model_of(name), name == QUANTISED[0]
    model, kv = loaded.model, loaded.kv
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    alone = []
    for prompt in prompts:
        caches, told = kv.new(model), []
        model(mx.array([prompt]), cache=caches)
        for token in (5, 6, 7):
            told.append(model(mx.array([[token]]), cache=caches)[0, -1])
        alone.append(told)
    together, padding = copies(kv.new(model), len(prompts)), [0, 0, 0]
    for begin, end in ((0, 4), (4, max(LENGTHS))):  # pieces, of which some rows have less or nothing left
        parts = [prompt[begin:end] for prompt in prompts]
        lengths, longest = [len(part) for part in parts], max(map(len, parts))
        missing = [longest - length for length in lengths]
        for cache in together:
            cache.prepare(lengths=lengths, right_padding=missing)
        model(mx.array([part + [0] * more for part, more in zip(parts, missing, strict=True)]), cache=together)
        for cache in together:
            cache.finalize()
        padding = [before + more for before, more in zip(padding, missing, strict=True)]
    for step, token in enumerate((5, 6)):
        logits = model(mx.array([[token]] * 3), cache=together)[:, -1]
        assert all(is_same(logits[at], alone[at][step], quantised) for at in range(3))
    keep_rows(together, [2, 0], padding)
    logits = model(mx.array([[7]] * 2), cache=together)[:, -1]
    assert is_same(logits[0], alone[2][2], quantised) and is_same(logits[1], alone[0][2], quantised)
    assert all(kind_of(leaf).is_known for leaf in leaves(together))
