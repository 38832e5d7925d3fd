"""Reasoning that is ended at its budget, by rows in a batch, with drafts, and on a second worker."""

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer

from mlx_model.config import SpeculationConfig
from mlx_model.loader import LoadedModel
from shared.sequences import SequenceSpec
from shared.text.codec import TextCodec
from shared.text.languages.families import REASONINGS
from shared.text.languages.grammars import after_reasoning
from tests.engine.conftest import Bench, prompt_of, spec

BUDGET, END = 6, 259  # `</think>` after the small models' own tokens
DRAFTS = SpeculationConfig(5, adapts_to_rows=False, adapts_to_time=False)


def thinking(loaded: LoadedModel, seq: str, *, prompt: int = 20, **sampling: object) -> SequenceSpec:
    tokenizer = Tokenizer.from_str(loaded.tokenizer.tokenizer_json)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    codec = TextCodec(msgspec.structs.replace(loaded.tokenizer, tokenizer_json=tokenizer.to_str()))
    assert codec.added_token("</think>") == END
    text = after_reasoning("", "open", REASONINGS["think"], codec, BUDGET)
    # Words that come again are what drafts are made from.
    return spec(seq, prompt_of(prompt) * 2, **({"max_tokens": 16, "grammar": text} | sampling))


SAMPLINGS = ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "seed": 5, "top_p": 0.9})


def alone(loaded: LoadedModel, each: SequenceSpec) -> list[int]:
    bench = Bench(loaded)
    bench.submit(each)
    bench.run()
    return bench.tokens(each.id)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_reasoning_is_as_it_would_be_up_to_its_budget(llama: LoadedModel, sampling: dict[str, object]) -> None:
    bounded = alone(llama, thinking(llama, "s", **sampling))
    free = alone(llama, thinking(llama, "s", **sampling, grammar=""))
    assert bounded[:BUDGET] == free[:BUDGET] and END not in free
    assert bounded[BUDGET] == END and len(bounded) == 16
    said = thinking(llama, "t", **sampling, grammar="")
    if not sampling:  # what follows is what the model says after these ids
        onward = msgspec.structs.replace(said, prompt_ids=(*said.prompt_ids, *bounded[: BUDGET + 1]))
        assert alone(llama, onward)[: 16 - BUDGET - 1] == bounded[BUDGET + 1 :]


@pytest.mark.parametrize("drafts", [None, DRAFTS], ids=["plain", "drafts"])
def test_a_budget_holds_in_a_batch_and_with_drafts(llama: LoadedModel, drafts: SpeculationConfig | None) -> None:
    rows = [thinking(llama, f"s{at}", prompt=9 + at, **SAMPLINGS[at % 3]) for at in range(5)]
    expected = {row.id: alone(llama, row) for row in rows}
    bench = Bench(llama, speculation=drafts)
    for row in rows:
        bench.submit(row)
        bench.turn()
    bench.run()
    assert {row.id: bench.tokens(row.id) for row in rows} == expected


@pytest.mark.parametrize("after", [BUDGET - 1, BUDGET, BUDGET + 1])
def test_a_second_worker_counts_on(llama: LoadedModel, after: int) -> None:
    each = thinking(llama, "s", temperature=1.0, seed=4)
    first = Bench(llama)
    first.submit(each)
    first.run()
    prior = tuple(first.events["s"][:after])
    second = Bench(llama)
    second.submit(each, prior=prior, attempt=2)
    second.run()
    assert [*(token for event in prior for token in event.tokens), *second.tokens("s")] == first.tokens("s")
