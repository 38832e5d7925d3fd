"""References to adapters: what they mean, and what is no reference."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.adapters import AdapterChoice, AdapterRef, check_name
from shared.errors import InvalidRequestError

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
versions = st.integers(min_value=1, max_value=999_999_999)
weights = st.floats(min_value=1e-6, max_value=1e6)


@st.composite
def refs(draw: st.DrawFn) -> AdapterRef:
    pairs = draw(st.lists(st.tuples(names, st.just(0) | versions), min_size=1, max_size=16, unique=True))
    if len(pairs) == 1:
        return AdapterRef((AdapterChoice(*pairs[0]),))
    return AdapterRef(tuple(AdapterChoice(name, version, draw(weights)) for name, version in pairs))


@settings(max_examples=50)
@given(refs())
def test_a_reference_survives_being_written_and_read(ref: AdapterRef) -> None:
    assert AdapterRef.parse(str(ref)) == ref


@given(st.text(max_size=60))
def test_any_text_is_a_reference_or_refused(text: str) -> None:
    try:
        ref = AdapterRef.parse(text)
    except InvalidRequestError:
        return
    assert AdapterRef.parse(str(ref)) == ref


@settings(max_examples=30)
@given(refs(), st.text(max_size=20))
def test_a_session_keeps_its_choice(ref: AdapterRef, session: str) -> None:
    assert ref.choose(session) is ref.choose(session)


def test_a_name_follows_and_a_version_does_not() -> None:
    assert AdapterRef.parse("policy").choices == (AdapterChoice("policy", 0),)
    assert AdapterRef.parse("policy").choices[0].follows
    assert not AdapterRef.parse("policy@12").choices[0].follows


def test_a_split_sends_sessions_by_weight() -> None:
    ref = AdapterRef.parse("a@12:0.9, a@13:0.1")
    taken = [ref.choose(f"user-{i}").version for i in range(4000)]
    assert 0.08 < taken.count(13) / len(taken) < 0.12


def test_shifting_weight_moves_only_the_sessions_between_the_cuts() -> None:
    before, after = AdapterRef.parse("a:0.9,b:0.1"), AdapterRef.parse("a:0.8,b:0.2")
    sessions = [f"user-{i}" for i in range(2000)]
    assert not any(before.choose(s).name == "b" and after.choose(s).name == "a" for s in sessions)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@1",
        "a@",
        "a@0",
        "a@01",
        "a@-1",
        "a@1.5",
        "a@9999999999",
        "a b",
        "../a",
        ".a",
        "-a",
        "ä",
        "a\n",
        "a" * 65,
        "a:0.5",
        "a,b",
        "a:0.5,b",
        "a:0,b:1",
        "a:-1,b:1",
        "a:nan,b:1",
        "a:inf,b:1",
        "a:1e7,b:1",
        "a@1:0.5,a@1:0.5",
        "a:1,",
        ",".join(f"a{i}:1" for i in range(17)),
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        AdapterRef.parse(text)


@pytest.mark.parametrize("name", ["policy", "a", "0.5B-lora_v2", "a" * 64])
def test_names(name: str) -> None:
    assert check_name(name) == name
