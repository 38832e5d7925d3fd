"""Where a sequence ends, and which text is shown on the way."""

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_model.loader import LoadedModel
from shared.frames import TokenEvent
from tests.engine.conftest import Bench, spec
from tests.engine.small_models import EOS
from worker.engine.batch.row import Row
from worker.engine.batch.running_batch import RunningBatch
from worker.engine.batch.stop_text import StopMatcher

PROMPT = list(b"hello")


def forced(text: str | bytes, seq: str = "s", **sampling: object):  # type: ignore[no-untyped-def]
    """A sequence whose tokens a test chooses: see `say`."""
    data = text.encode() if isinstance(text, str) else text
    return spec(seq, PROMPT, **({"max_tokens": len(data), "ignore_eos": False} | sampling)), list(data)


def say(bench: Bench, seq: str, tokens: list[int]) -> None:
    """Run a sequence, replacing each drawn token by the given one on its way to the row."""
    batch = cast(RunningBatch, bench.engine._batch)
    inner, left = batch._add_news, list(tokens)

    def said(tokens: list[tuple[Row, int]]) -> None:
        inner([(row, left.pop(0) if row.spec.id == seq else token) for row, token in tokens])

    batch._add_news = said  # type: ignore[method-assign]
    bench.run()


@pytest.mark.parametrize(
    ("text", "stop", "shown", "match"),
    [
        ("abcSTOPdef", ("STOP",), "abc", "STOP"),
        ("abcSTOdefSTOP", ("STOP",), "abcSTOdef", "STOP"),
        ("aaab", ("aab",), "a", "aab"),
        ("xyz", ("q",), "xyz", None),
        ("one\n\ntwo", ("\n\n", "two"), "one", "\n\n"),
        ("abcdef", ("def", "bc"), "a", "bc"),
        ("näxt ☃ end", ("☃",), "näxt ", "☃"),
        ("endST", ("STOP",), "endST", None),  # length: what was held comes out
    ],
)
def test_a_stop_string_split_over_tokens_ends_the_text_before_it(
    bench: Bench, text: str, stop: tuple[str, ...], shown: str, match: str | None
) -> None:
    each, tokens = forced(text, stop=stop)
    bench.submit(each)
    say(bench, "s", tokens)
    assert bench.text("s") == shown
    finish = bench.finish("s")
    assert (finish.reason, finish.stop_match) == (("stop", match) if match else ("length", None))


def test_include_stop_str_keeps_it(bench: Bench) -> None:
    each, tokens = forced("abcSTOPdef", stop=("STOP",), include_stop_str=True)
    bench.submit(each)
    say(bench, "s", tokens)
    assert bench.text("s") == "abcSTOP"
    assert bytes(bench.tokens("s")) == b"abcSTOP"


def test_no_event_shows_a_part_of_a_stop_string_or_of_a_character(bench: Bench) -> None:
    each, tokens = forced("a☃b☃ST☃STOP", stop=("STOP",))
    bench.submit(each)
    say(bench, "s", tokens)
    deltas = [event.text for event in bench.events["s"]]
    assert deltas[:8] == ["a", "", "", "☃", "b", "", "", "☃"]
    assert "".join(map(str, deltas)) == "a☃b☃ST☃"
    assert "\ufffd" not in "".join(map(str, deltas))


def test_rows_without_stop_strings_have_no_text(bench: Bench) -> None:
    bench.submit(spec("s", PROMPT))
    bench.run()
    assert all(event.text is None for event in bench.events["s"])


def test_an_incomplete_character_at_the_end_is_flushed(bench: Bench) -> None:
    each, tokens = forced("ab☃".encode()[:-1], stop=("zz",))
    bench.submit(each)
    say(bench, "s", tokens)
    assert bench.text("s") == "ab\ufffd"


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_end_of_sequence_is_among_the_tokens_and_not_in_the_text(bench: Bench, stop: tuple[str, ...]) -> None:
    each, tokens = forced(b"abcdefz", stop=stop)
    bench.submit(each)
    say(bench, "s", [*tokens[:3], EOS])
    assert bench.tokens("s") == [*b"abc", EOS]
    finish = bench.finish("s")
    assert (finish.reason, finish.stop_match) == ("stop", None)
    assert not stop or bench.text("s") == "abc"
    assert len(bench.logprobs("s")) == 4


def test_a_stop_token_names_itself(bench: Bench) -> None:
    each, tokens = forced("abcdef", stop_token_ids=(ord("d"),))
    bench.submit(each)
    say(bench, "s", tokens)
    assert (bench.finish("s").reason, bench.finish("s").stop_match) == ("stop", ord("d"))
    assert bench.tokens("s") == list(b"abcd")


def test_ignore_eos_goes_on(bench: Bench) -> None:
    each, _ = forced(b"abcdef", ignore_eos=True)
    bench.submit(each)
    say(bench, "s", [*b"ab", EOS, *b"def"])
    assert bench.finish("s").reason == "length"
    assert len(bench.tokens("s")) == 6


def test_min_tokens_holds_off_stops_of_every_kind(bench: Bench) -> None:
    each, tokens = forced("abSTOPcdSTOPef", stop=("STOP", "ab"), min_tokens=6)
    bench.submit(each)
    say(bench, "s", tokens)
    assert bench.text("s") == "abSTOPcd"
    assert bench.finish("s").stop_match == "STOP"


def test_min_tokens_keeps_the_model_from_ending(llama: LoadedModel) -> None:
    bias: dict[int, float] = {EOS: 1000.0}
    bench = Bench(llama)
    bench.submit(
        spec("s", PROMPT, ignore_eos=False, min_tokens=5, logit_bias=bias),
        spec("t", PROMPT, ignore_eos=False, logit_bias=bias),
    )
    bench.run()
    assert EOS not in bench.tokens("s")[:5]
    assert bench.tokens("s")[5:] == [EOS]
    assert bench.tokens("t") == [EOS]


def test_the_last_token_may_stop_and_be_the_last(bench: Bench) -> None:
    each, tokens = forced("abcST", stop=("ST",))
    bench.submit(each)
    say(bench, "s", tokens)
    assert bench.finish("s").reason == "stop"


@given(
    text=st.text("abX", max_size=30),
    cuts=st.lists(st.integers(1, 3), max_size=30),
    stops=st.lists(st.text("abX", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_matcher_finds_what_a_search_of_the_whole_text_finds(text: str, cuts: list[int], stops: list[str]) -> None:
    matcher, shown, match, rest = StopMatcher(tuple(stops), False), "", None, text
    for cut in [*cuts, len(text)]:
        piece, rest = rest[:cut], rest[cut:]
        delta, match = matcher.push(piece)
        shown += delta
        if match:
            break
    shown += "" if match else matcher.flush()
    if match is None:
        assert shown == text and not any(stop in text for stop in stops)
    else:
        assert text.startswith(shown + match)
        assert not any(stop in shown for stop in stops)


def test_a_finish_of_an_earlier_attempt_is_given_again(bench: Bench) -> None:
    each, tokens = forced("abcSTOP", stop=("STOP",))
    bench.submit(each)
    say(bench, "s", tokens)
    prior = tuple(bench.events.pop("s"))
    bench.submit(each, prior=prior, attempt=2)
    bench.run()
    (event,) = bench.events["s"]
    assert event.finish == prior[-1].finish and event.tokens == [] and event.position == 7
    assert isinstance(event, TokenEvent) and event.attempt == 2
