"""Embeddings are the model's own hidden states, pooled, whatever runs beside them."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_model.loader import LoadedModel
from shared.sequences import Pooling, SamplingParams, SequenceSpec
from tests.engine.conftest import Bench, SpiedModel, prompt_of, spec


def wanted(seq: str, ids: list[int], pooling: Pooling = "mean") -> SequenceSpec:
    return SequenceSpec(seq, "m", tuple(ids), SamplingParams(0, 0), kind="embed", pooling=pooling)


def vector(bench: Bench, seq: str) -> np.ndarray:
    [event] = bench.events[seq]
    assert event.finish is not None and event.finish.reason == "stop" and event.tokens == []
    assert event.embedding is not None
    return np.frombuffer(event.embedding, "<f4")


def reference(loaded: LoadedModel, ids: list[int], pooling: Pooling) -> np.ndarray:
    hidden_LH = np.array(loaded.model.model(mx.array([ids]))[0].astype(mx.float32))
    return {"mean": hidden_LH.mean(axis=0), "last": hidden_LH[-1], "cls": hidden_LH[0]}[pooling]


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
@pytest.mark.parametrize("length", [1, 64, 150])
def test_a_vector_is_the_pooled_hidden_state_in_any_chunks(model: LoadedModel, pooling: Pooling, length: int) -> None:
    ids = prompt_of(length)
    bench = Bench(model, prefill_chunk=64)
    bench.submit(wanted("e", ids, pooling))
    bench.run()
    np.testing.assert_allclose(vector(bench, "e"), reference(model, ids, pooling), rtol=1e-4, atol=1e-5)


def test_rows_that_decode_and_inputs_that_are_embedded_leave_each_other_alone(llama: LoadedModel) -> None:
    row = spec("s", prompt_of(20), temperature=1.0, seed=3, max_tokens=30)
    alone = Bench(llama)
    alone.submit(row)
    alone.run()
    bench = Bench(llama, prefill_chunk=16)
    bench.submit(row)
    bench.turn()
    inputs = {f"e{at}": prompt_of(10 + 17 * at, seed=at) for at in range(5)}
    bench.submit(*(wanted(seq, ids) for seq, ids in inputs.items()))
    bench.run()
    assert bench.tokens("s") == alone.tokens("s")
    for seq, ids in inputs.items():
        np.testing.assert_allclose(vector(bench, seq), reference(llama, ids, "mean"), rtol=1e-4, atol=1e-5)
    assert bench.engine.stats().rows == 0


def test_equal_inputs_are_computed_once_and_differ_from_a_completion_of_the_same_ids(llama: LoadedModel) -> None:
    ids = prompt_of(40)
    bench = Bench(llama)
    spy = SpiedModel.inside(bench)
    bench.engine._model.model.model = llama.model.model  # the part that embeds
    bench.submit(wanted("a", ids), wanted("b", ids), wanted("c", ids, "last"), spec("s", ids))
    bench.run()
    np.testing.assert_array_equal(vector(bench, "a"), vector(bench, "b"))
    assert not np.array_equal(vector(bench, "a"), vector(bench, "c"))
    assert len(bench.tokens("s")) == 8 and spy.fed


def test_a_model_without_hidden_states_refuses(llama: LoadedModel) -> None:
    bench = Bench(llama)
    SpiedModel.inside(bench)  # shows nothing but logits
    bench.submit(wanted("e", [1, 2]))
    bench.run()
    assert bench.finish("e").reason == "error" and "hidden states" in bench.finish("e").error_message
