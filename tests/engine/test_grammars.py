"""Rows with a grammar: whatever the model would rather say, what comes out is valid."""

import json
import re
import threading
import time

import jsonschema
import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel
from shared.frames import TokenEvent
from shared.sequences import SequenceSpec
from shared.text import grammar
from tests.engine.conftest import Bench, prompt_of, spec
from tests.engine.small_models import EOS
from tests.waiting import HANG_S
from worker.engine.batch import grammars
from worker.engine.messages import RowRequest
from worker.engine.orders import Cancel, Submit
from worker.engine.thread import EngineThread

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = grammar.of_schema(SCHEMA, any_whitespace=False)
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.5, "seed": 2, "top_p": 0.8, "top_k": 20},
    {"temperature": 1.0, "seed": 3, "min_p": 0.2, "repetition_penalty": 1.3, "logit_bias": {ord("}"): -50.0}},
]


def constrained(seq: str, text: str, **sampling: object) -> SequenceSpec:
    return spec(seq, prompt_of(9), **({"max_tokens": 200, "ignore_eos": False, "grammar": text} | sampling))


def said(bench: Bench, seq: str) -> str:
    """The text, without the end-of-sequence token that a grammar demands."""
    *tokens, last = bench.tokens(seq)
    assert last == EOS
    return bytes(tokens).decode()


@pytest.mark.long
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_random_weights_write_json_of_the_schema(model: LoadedModel, sampling: dict[str, object]) -> None:
    bench = Bench(model)
    bench.submit(constrained("s", PERSON, **sampling))
    bench.run()
    jsonschema.validate(json.loads(said(bench, "s")), SCHEMA)
    assert bench.finish("s").reason == "stop"


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        (grammar.of_regex(r"[a-f]{3}-\d{2}"), r"[a-f]{3}-\d{2}"),
        (grammar.of_choice(["yes", "no", 'say "ü"']), r'yes|no|say "ü"'),
        (grammar.of_ebnf('root ::= "a" | "b" root'), r"b*a"),
        (grammar.of_ebnf('start: "x" NUMBER\nNUMBER: /[0-9]{1,3}/'), r"x\d{1,3}"),
    ],
)
def test_other_grammars_hold_too(llama: LoadedModel, text: str, pattern: str) -> None:
    bench = Bench(llama)
    bench.submit(
        *(constrained(f"s{seed}", text, temperature=1.0, seed=seed, logit_bias={97: 20.0}) for seed in range(4))
    )
    bench.run()
    for seed in range(4):
        assert re.fullmatch(pattern, said(bench, f"s{seed}"))


@pytest.mark.long
def test_a_batch_of_both_kinds_gives_every_row_what_it_gets_alone(model: LoadedModel) -> None:
    """Rows come and go at different times, so that plans change while matchers are under way."""
    rows = [
        constrained(f"s{at}", PERSON, **SAMPLINGS[at % 4])
        if at % 2
        else spec(f"s{at}", prompt_of(7 + at), max_tokens=at * 9 + 5)
        for at in range(7)
    ]
    alone = {}
    for row in rows:
        bench = Bench(model)
        bench.submit(row)
        bench.run()
        alone[row.id] = bench.tokens(row.id)
    together = Bench(model)
    for row in rows:
        together.submit(row)
        together.turn()
        together.turn()
    together.run()
    assert {row.id: together.tokens(row.id) for row in rows} == alone


def test_samples_of_one_prompt_share_a_prefill_and_part_ways(llama: LoadedModel) -> None:
    bench = Bench(llama)
    bench.submit(*(constrained(f"s{at}", PERSON, temperature=1.0, seed=at) for at in range(5)))
    bench.run()
    texts = {said(bench, f"s{at}") for at in range(5)}
    assert len(texts) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_max_tokens_cuts_it_with_length(llama: LoadedModel) -> None:
    bench = Bench(llama)
    bench.submit(constrained("s", PERSON, max_tokens=6))
    bench.run()
    assert bench.finish("s").reason == "length"
    assert bytes(bench.tokens("s")) == b'{"name'[:6]


@pytest.mark.long
@pytest.mark.parametrize("after", [1, 7, 25])
def test_another_worker_continues_inside_the_grammar(model: LoadedModel, after: int) -> None:
    each = constrained("s", PERSON, temperature=1.0, seed=5)
    whole = Bench(model)
    whole.submit(each)
    whole.run()
    second = Bench(model)
    second.submit(each, prior=tuple(whole.events["s"][:after]), attempt=2)
    second.run()
    assert whole.tokens("s")[:after] + second.tokens("s") == whole.tokens("s")


def test_tokens_that_leave_the_grammar_end_the_row_with_a_reason(llama: LoadedModel) -> None:
    """Of an earlier attempt: nothing of ours writes them."""
    bench = Bench(llama)
    bench.submit(constrained("s", PERSON), prior=(TokenEvent("s", 1, 0, [*b"no"], [0.0, 0.0]),), attempt=2)
    bench.submit(spec("other", prompt_of(4)))
    bench.run()
    assert bench.finish("s").error_code == "invalid_grammar"
    assert bench.finish("other").reason == "length"


def test_a_grammar_that_compiles_nowhere_ends_its_row_alone(llama: LoadedModel) -> None:
    bench = Bench(llama)
    bench.submit(constrained("s", grammar.of_lark("start: /(/")), spec("other", prompt_of(4)))
    bench.run()
    assert (bench.finish("s").reason, bench.finish("s").error_code) == ("error", "invalid_grammar")
    assert bench.finish("other").reason == "length"


def test_a_parser_limit_ends_the_row_while_it_runs(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(text: str, tokenizer: LLTokenizer) -> LLMatcher:
        return LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(step_lexer_fuel=300))

    monkeypatch.setattr(grammars, "matcher_of", limited)
    bench = Bench(llama)
    text = grammar.of_regex(r"[a-z]{3}(.*x){4}[0-9]{40}|[a-z]{3}(.*y){6}")
    bench.submit(constrained("s", text), spec("other", prompt_of(4)))
    bench.run()
    assert bench.finish("s").error_code == "invalid_grammar"
    assert 0 < len(bench.tokens("s")) < 10
    assert bench.finish("other").reason == "length"


def test_the_thread_compiles_beside_the_loop(llama_folder: object) -> None:
    from threading import Event

    ended, events = Event(), []

    def on_step(output: object) -> None:
        events.extend(output.events)  # type: ignore[attr-defined]
        if events[-1].finish is not None:
            ended.set()

    thread = EngineThread(EngineConfig(str(llama_folder)), on_step, lambda error: ended.set())
    thread.start()
    try:
        thread.send(Submit([RowRequest(constrained("s", PERSON))]))
        assert ended.wait(HANG_S)
    finally:
        assert thread.stop()
    tokens = [token for event in events for token in event.tokens]
    jsonschema.validate(json.loads(bytes(tokens[:-1])), SCHEMA)


class Gate:
    """Holds compilations up until it is opened or lets some through, and knows which have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.open = threading.Event()
        self.let = threading.Semaphore(0)
        self._at_it = threading.Semaphore(0)
        compile_ = grammars.matcher_of

        def held(text: str, tokenizer: LLTokenizer) -> LLMatcher:
            self.begun.append(text)
            self._at_it.release()
            until = time.monotonic() + HANG_S
            while not self.open.is_set() and not self.let.acquire(timeout=0.02):
                assert time.monotonic() < until, "nobody opens it"
            return compile_(text, tokenizer)

        monkeypatch.setattr(grammars, "matcher_of", held)

    def wait_for(self, count: int) -> None:
        """Until so many more have come to it: a thread may have taken one and not come yet."""
        for _ in range(count):
            assert self._at_it.acquire(timeout=HANG_S)


def test_one_owner_s_grammars_leave_the_others_their_turn(llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, compiled = Gate(monkeypatch), threading.Semaphore(0)
    compiling = grammars.Grammars(llama.tokenizer, llama.card.vocab_size, compiled.release)
    many = [grammar.of_regex(f"a{{{count}}}") for count in range(1, 7)]
    places = [compiling.open(each, [], "a") for each in many]
    other = grammar.of_regex("b")
    gate.wait_for(grammars.THREADS)
    places.append(compiling.open(other, [], "b"))
    assert set(gate.begun) == set(many[: grammars.THREADS])
    gate.let.release(grammars.THREADS)
    gate.wait_for(grammars.THREADS)
    assert other in gate.begun[grammars.THREADS :], "before the rest of the first owner's"
    gate.open.set()
    for _ in places:
        assert compiled.acquire(timeout=HANG_S)
    compiling.close()
    assert all(place.ready for place in places)


def test_a_cancelled_row_s_grammar_is_not_begun(llama_folder: object, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, cancelled, ended, finishes = Gate(monkeypatch), threading.Event(), threading.Event(), {}

    def on_step(output: object) -> None:
        finishes.update({event.seq: event.finish for event in output.events if event.finish})  # type: ignore[attr-defined]
        if "c" in finishes:
            cancelled.set()
        if len(finishes) == 4:
            ended.set()

    texts = {seq: grammar.of_regex(f"{seq}{{3}}") for seq in "abcd"}
    thread = EngineThread(EngineConfig(str(llama_folder)), on_step, lambda error: ended.set())
    thread.start()
    try:
        thread.send(Submit([RowRequest(constrained(seq, text)) for seq, text in texts.items()]))
        thread.send(Cancel("c"))
        assert cancelled.wait(HANG_S)
        gate.open.set()
        assert ended.wait(HANG_S)
    finally:
        gate.open.set()
        assert thread.stop()
    assert {seq: finish.reason for seq, finish in finishes.items()} == {
        "a": "stop", "b": "stop", "c": "cancelled", "d": "stop"
    }  # fmt: skip
    assert set(gate.begun) == {texts["a"], texts["b"], texts["d"]}


class Failing:
    """Stands in for a matcher; raises where it is asked so, and where masks are made together, since it is none."""

    def __init__(self, matcher: LLMatcher, at: str) -> None:
        self._matcher = matcher
        self._at = at

    def __getattr__(self, name: str) -> object:
        if name == self._at:
            raise ValueError("the matcher is gone")
        return getattr(self._matcher, name)


@pytest.mark.parametrize("at", ["consume_token", "unsafe_compute_mask_ptr"])
def test_a_matcher_that_raises_ends_its_own_row_only(llama: LoadedModel, at: str) -> None:
    digits = grammar.of_regex("[0-9]{30}")
    rows = [spec(f"s{at}", prompt_of(9, seed=at), max_tokens=20, grammar=digits) for at in range(3)]
    plain, bench = Bench(llama), Bench(llama)
    for each in (plain, bench):
        each.submit(*rows)
        each.turn()
    place = bench.engine._rows["s1"].place
    assert place is not None
    place._matcher = Failing(place.matcher, at)  # type: ignore[assignment]
    for each in (plain, bench):
        each.run()
    assert bench.finish("s1").reason == "error"
    assert [bench.tokens(f"s{at}") for at in (0, 2)] == [plain.tokens(f"s{at}") for at in (0, 2)]
