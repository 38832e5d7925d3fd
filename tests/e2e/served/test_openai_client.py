"""The openai Python client against the real processes."""

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.rings import MODEL, Ring
from tests.waiting import HANG_S, wait_until

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(served: Ring):
    with OpenAI(base_url=served.openai_url, api_key="none", max_retries=0) as made:
        yield made


def test_chat_answers_a_greeting(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=64)
    choice = answer.choices[0]
    assert "tiny model" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_and_whole_answer_are_the_same_text(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0.8, seed=7, max_tokens=48)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        temperature=0.8,
        seed=7,
        max_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, finish = "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_n_choices_differ_and_each_is_reproducible(client: OpenAI) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(model=MODEL, prompt="Repeat:", n=4, temperature=1.5, seed=11, max_tokens=24)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.text for choice in answer.choices]

    first = ask()
    assert len(set(first)) > 1
    assert ask() == first


def test_chat_logprobs_have_one_entry_a_token(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and answer.usage is not None
    assert len(logprobs.content) in (answer.usage.completion_tokens, answer.usage.completion_tokens - 1)
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(max(top.logprob for top in token.top_logprobs), abs=1e-4)
    assert "".join(token.token for token in logprobs.content) == answer.choices[0].message.content


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=48)
    text = whole.choices[0].message.content or ""
    stop = text[5:9]  # lies across token borders
    cut = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=48, stop=[stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_echo_with_logprobs_scores_the_prompt(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello there", max_tokens=1, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text.startswith("hello there")
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


@pytest.mark.parametrize(
    ("body", "error", "word"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "nobody"),
        ({"max_tokens": 1_000_000}, openai.BadRequestError, "context"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"best_of_all": 1}}, openai.BadRequestError, "best_of_all"),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError, "response_format"),
    ],
)
def test_bad_requests_are_refused_by_name(client: OpenAI, body: dict, error: type, word: str) -> None:
    request = {"model": MODEL, "messages": HELLO, **body}
    with pytest.raises(error) as raised:
        client.chat.completions.create(**request)
    assert word in str(raised.value)
    assert set(raised.value.response.json()["error"]) == {"message", "type", "param", "code"}


def test_models_lists_what_a_worker_serves(client: OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


async def test_a_disconnect_frees_the_row(served: Ring) -> None:
    async with AsyncOpenAI(base_url=served.openai_url, api_key="none") as client:
        stream = await client.completions.create(
            model=MODEL, prompt="Count from 1 to", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()

        async with httpx.AsyncClient(timeout=HANG_S) as http:

            async def idle() -> bool:
                health = (await http.get(f"{served.url}/health")).json()
                return all(worker["rows"] == 0 for worker in health["workers"])

            await wait_until(idle)
