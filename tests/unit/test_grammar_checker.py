"""Grammars are checked in processes that may be killed, and that a grammar may end."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from llguidance import LLMatcher

from api.callers import caller
from api.callers.caller import Client
from api.checks.grammars import GrammarChecker
from shared.errors import InvalidGrammarError, RequestCancelledError
from shared.sequences import ModelCard
from shared.text import grammar
from tests.unit.api_texts import EOS, bundle, codec
from tests.waiting import wait_until

CARD = ModelCard("m", 64, codec().vocab_size, (EOS,), bundle().sha256, "", 1, "float32")
SLOW = "root ::= r0\n" + "\n".join(f'r{i} ::= "a" r{i + 1}' for i in range(8000)) + '\nr8000 ::= "x"'
DEEP = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(5000)) + '\nr5000: "x"'


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    await made.close()


async def test_a_grammar_in_any_form_passes_as_workers_take_it(checker: GrammarChecker) -> None:
    schema = grammar.of_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert await checker.checked(schema, CARD, codec()) == schema
    wanted = grammar.of_ebnf('root ::= "a" | "b" root')
    assert await checker.checked(grammar.unconverted('root ::= "a" | "b" root'), CARD, codec()) == wanted
    composed = grammar.compose("start: @body", {"body": grammar.unconverted('root ::= "a"')})
    assert "lark_grammar" in await checker.checked(composed, CARD, codec())
    for wrong in ('root ::= "a', "nonsense", "root ::= missing"):
        with pytest.raises(InvalidGrammarError):
            await checker.checked(grammar.unconverted(wrong), CARD, codec())


async def test_a_grammar_that_ends_its_process_is_refused_and_the_next_one_is_checked(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidGrammarError, match="ends the compiler"):
        await checker.checked(grammar.unconverted(DEEP), CARD, codec())
    await checker.checked(grammar.of_choice(["a", "b"]), CARD, codec())


async def test_a_grammar_that_takes_too_much_computing_is_refused() -> None:
    checker = GrammarChecker(computing_s=0.2)
    with pytest.raises(InvalidGrammarError, match=r"more than 0\.2 s to compile"):
        await checker.checked(grammar.unconverted(SLOW), CARD, codec())
    await checker.close()


def test_a_check_computes_what_a_worker_will_and_not_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """To validate a grammar takes half of that, or less: its limit would let pass what holds a worker up."""
    computed: list[tuple[Any, ...]] = []

    def compiled(*given: Any, **how: Any) -> LLMatcher:
        computed.append((*given, how))
        return LLMatcher(*given, **how)

    tokenizer = grammar.tokenizer_of(bundle(), codec().vocab_size)
    text = grammar.of_choice(["a", "b"])
    monkeypatch.setattr(grammar, "LLMatcher", compiled)
    grammar.check(text, tokenizer)
    grammar.matcher_of(text, tokenizer)
    checked, in_a_worker = computed
    assert checked == in_a_worker


async def test_a_long_grammar_is_refused_unseen(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidGrammarError, match="262144 is the limit"):
        await checker.checked(grammar.of_choice(["a" * 262_144]), CARD, codec())


async def test_a_check_ends_with_its_client_and_others_do_not_wait_for_it(checker: GrammarChecker) -> None:
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def ask(name: str) -> str:
        caller.client.set(Client(name, receive))
        return await checker.checked(grammar.unconverted(SLOW), CARD, codec())

    asking = [asyncio.create_task(ask("10.0.0.1")) for _ in range(8)]
    await wait_until(lambda: checker._pool.busy.total() == 1)
    await checker.checked(grammar.of_choice(["a", "b"]), CARD, codec())
    assert not any(task.done() for task in asking)
    left.set()
    for task in asking:
        with pytest.raises(RequestCancelledError):
            await task
    assert checker._pool.busy.total() == 0


@pytest.mark.parametrize("schema", [{"patternProperties": {f"^a{i}[a-z]*b": {} for i in range(400)}}])
def test_patterns_of_names_are_bounded(schema: dict[str, Any]) -> None:
    nested = {"type": "object", "properties": {"a": {"anyOf": [schema]}}}
    for write in (grammar.of_schema, grammar.inline_schema):
        with pytest.raises(InvalidGrammarError, match="400 'patternProperties', and 64 is the limit"):
            write(nested)


def test_a_schema_as_text_that_is_nested_too_deep_is_refused() -> None:
    for depth in (200, 900, 5000):
        with pytest.raises(InvalidGrammarError, match="nested"):
            grammar.of_schema(grammar.schema_of('{"a":' * depth + "1" + "}" * depth))
