"""A sequence continued after another worker's death goes on as if nothing had happened."""

import pytest

from mlx_model.loader import LoadedModel
from shared.frames import TokenEvent
from tests.engine.conftest import Bench, prompt_of, spec

WHOLE: dict[tuple[str, str], Bench] = {}  # each in one attempt


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.9, "seed": 4, "top_p": 0.9, "presence_penalty": 0.8, "repetition_penalty": 1.2},
        {"temperature": 1.0, "seed": 5, "min_tokens": 12, "ignore_eos": False, "stop_token_ids": tuple(range(30))},
        {"temperature": 1.0, "seed": 6, "stop": ("\x10\x11", "zzzz")},
        {"temperature": 1.0, "seed": 7, "top_logprobs": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("after", [1, 5, 15])
def test_the_second_attempt_continues_identically(model: LoadedModel, sampling: dict[str, object], after: int) -> None:
    each = spec("s", prompt_of(20), **({"max_tokens": 20} | sampling))
    whole = WHOLE.get((model.card.name, str(sampling)))
    if whole is None:
        whole = WHOLE[model.card.name, str(sampling)] = Bench(model)
        whole.submit(each)
        whole.run()
    prior = tuple(whole.events["s"][:after])
    second = Bench(model)
    second.submit(spec("other", prompt_of(50), temperature=1.0))
    second.submit(each, prior=prior, attempt=2)
    second.run()
    rest = second.events["s"]
    tokens = [token for event in prior for token in event.tokens] + second.tokens("s")
    assert tokens == whole.tokens("s")
    assert rest[0].position == after and rest[0].attempt == 2
    assert second.finish("s") == whole.finish("s")
    assert "".join(event.text or "" for event in (*prior, *rest)) == whole.text("s")


def test_text_held_back_at_the_border_is_neither_lost_nor_doubled(llama: LoadedModel) -> None:
    each = spec("s", [1, 2, 3], stop=("STOP",), max_tokens=8)
    events = [
        TokenEvent("s", 1, 0, [*b"aS"], [0.0, 0.0], text="a"),
        TokenEvent("s", 1, 2, [*b"TO"], [0.0, 0.0], text=""),
    ]
    bench = Bench(llama)
    bench.submit(each, prior=tuple(events), attempt=2)
    bench.run()
    decoded = bytes([*b"aSTO", *(token for token in bench.tokens("s") if token < 256)])
    shown = "a" + bench.text("s")
    assert decoded.decode(errors="replace").startswith(shown[:4])
    assert shown.startswith("aSTO")


def test_text_that_an_earlier_attempt_owed_comes_with_the_first_event(llama: LoadedModel) -> None:
    """Its tokens were logged, and it died before their text was."""
    prior = (TokenEvent("s", 1, 0, [*b"abc"], [0.0] * 3, text="a"),)
    bench = Bench(llama)
    bench.submit(spec("s", [1, 2], stop=("zz",), max_tokens=5), prior=prior, attempt=2)
    bench.run()
    assert bench.text("s").startswith("bc")


def test_earlier_attempts_that_already_ended_it_bring_a_finish_without_tokens(bench: Bench) -> None:
    full = (TokenEvent("s", 1, 0, [1] * 12, [0.0] * 12),)
    bench.submit(spec("s", [1, 2], max_tokens=12), prior=full, attempt=3)
    stopped = (TokenEvent("t", 1, 0, [1, 7], [0.0] * 2),)
    bench.submit(spec("t", [1, 2], stop_token_ids=(7,)), prior=stopped, attempt=3)
    text = (TokenEvent("u", 1, 0, [*b"abSTOP"], [0.0] * 6, text="a"),)
    bench.submit(spec("u", [1, 2], stop=("STOP",)), prior=text, attempt=3)
    bench.run()
    assert [event.tokens for seq in "stu" for event in bench.events[seq]] == [[], [], []]
    assert bench.finish("s").reason == "length" and bench.events["s"][0].position == 12
    assert (bench.finish("t").reason, bench.finish("t").stop_match) == ("stop", 7)
    assert (bench.finish("u").stop_match, bench.text("u")) == ("STOP", "b")
