"""The model that is committed, through the whole engine."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from shared.text.codec import TextCodec
from tests.engine.conftest import Bench, spec

FOLDER = Path(__file__).parents[2] / "models" / "tiny"
QUESTIONS = ["What is 12 + 7?", "Count from 3 to 9.", "Hello!", "What is 40 + 2?", "Say hi."]


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model(EngineConfig(str(FOLDER)))


def test_greedy_answers_equal_mlx_lm_s_own_generation(tiny: LoadedModel) -> None:
    codec, bench = TextCodec(tiny.tokenizer), Bench(tiny)
    prompts = [codec.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    bench.submit(*(spec(str(i), prompt, max_tokens=40, ignore_eos=False) for i, prompt in enumerate(prompts)))
    bench.run()
    for index, prompt in enumerate(prompts):
        expected: list[int] = []
        for token, _ in generate_step(mx.array(prompt), tiny.model, max_tokens=40):
            expected.append(int(token))
            if token in tiny.card.eos_token_ids:
                break
        assert bench.tokens(str(index)) == expected
        assert bench.finish(str(index)).reason == "stop"


def test_a_stop_string_ends_an_answer(tiny: LoadedModel) -> None:
    codec, bench = TextCodec(tiny.tokenizer), Bench(tiny)
    prompt = codec.encode_chat([{"role": "user", "content": "Count from 3 to 9."}])
    bench.submit(spec("t", prompt, max_tokens=60, ignore_eos=False))
    bench.run()
    whole = codec.decode(bench.tokens("t"))
    stop = whole[len(whole) // 2 :][:2]
    bench.submit(spec("s", prompt, max_tokens=60, ignore_eos=False, stop=(stop,)))
    bench.run()
    assert bench.text("s") == whole[: whole.index(stop)]
    assert bench.finish("s").stop_match == stop


def test_kv_of_8_bits_predicts_what_full_precision_does(tiny: LoadedModel) -> None:
    quantised = load_model(EngineConfig(str(FOLDER), kv_bits=8, kv_group_size=32))
    assert quantised.card.kv == "8 bits, groups of 32, 3 of 3 caches"
    codec, logprobs = TextCodec(tiny.tokenizer), []
    ids = [id_ for each in QUESTIONS for id_ in codec.encode_chat([{"role": "user", "content": each}])]
    for loaded in (tiny, quantised):
        logits = loaded.model(mx.array([ids]), cache=loaded.kv.new(loaded.model))[0].astype(mx.float32)
        logprobs.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    divergence = (mx.exp(logprobs[0]) * (logprobs[0] - logprobs[1])).sum(axis=-1)
    assert 0 < divergence.mean().item() < 1e-3
