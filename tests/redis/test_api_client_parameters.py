"""What other clients send besides OpenAI's core, through a real Redis, answered by a scripted worker."""

import asyncio
from typing import Any

import pytest

from api.generation.running import settled
from api.openai.chat import UNUSED_HEADER
from shared.sequences import SequenceSpec
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import CARD, Answer, ScriptedWorker, working
from tests.unit.api_texts import codec, ids
from tests.waiting import wait_until

HELLO = [{"role": "user", "content": "hi"}]


def script(spec: SequenceSpec) -> Answer:
    """The prompt decides."""
    return Answer("held back", hold_at=2) if codec().decode(spec.prompt_ids).startswith("hold") else Answer("hello")


# -- what happens to new requests under a pause


ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "say"}),
    ("/v1/chat/completions", {"messages": HELLO, "stream": True}),
    ("/v1/embeddings", {"input": "say"}),
    ("/inference/v1/generate", {"token_ids": [5]}),
]


async def test_a_server_may_refuse_new_requests_while_paused(redis_url: str) -> None:
    async with api(redis_url, pause_new_requests="refuse") as refusing:
        assert (await refusing.http.post("/pause")).status_code == 200, "nobody is there to wait for"
        async with working(redis_url, script):  # comes later, and does not look at the pause
            for path, body in ASKS:
                refused = await refusing.post(path, body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "paused"), path
                assert "POST /resume" in refused.json()["error"]["message"]
                assert int(refused.headers["retry-after"]) > 0
            await refusing.ring.redis.delete("parallm:pause")
            assert (await refusing.post("/v1/completions", {"prompt": "say"})).status_code == 200


async def test_by_default_a_request_under_a_pause_waits(redis_url: str) -> None:
    async with api(redis_url) as waiting:
        assert (await waiting.http.post("/pause")).status_code == 200
        async with working(redis_url, script) as worker:
            worker.paused = True
            asking = asyncio.create_task(waiting.post("/v1/completions", {"prompt": "say"}))
            await wait_until(lambda: waiting.ring.load.under_way == 1)
            worker.paused = False
            assert (await asking).status_code == 200


# -- hints and limits


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reasoning_effort_that_the_template_does_not_know_is_said_in_a_header(
    server: Api, stream: bool
) -> None:
    body = {"messages": HELLO, "reasoning_effort": "high", "stream": stream}
    response = await server.post("/v1/chat/completions", body)
    assert (response.status_code, response.headers[UNUSED_HEADER]) == (200, "reasoning_effort")
    body = {"input": "hi", "reasoning": {"effort": "low"}, "stream": stream}
    response = await server.post("/v1/responses", body)
    assert (response.status_code, response.headers[UNUSED_HEADER]) == (200, "reasoning.effort")
    assert UNUSED_HEADER not in (await server.post("/v1/chat/completions", {"messages": HELLO})).headers


async def test_max_tokens_beyond_the_context_are_cut_to_it_where_the_server_says_so(
    redis_url: str, server: Api, worker: ScriptedWorker
) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "say", "max_tokens": 32_000}),
        ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": 32_000}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 32_000}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 32_000}}),
        ("/generate", {"prompt": "say", "max_tokens": 32_000}),
    ]
    for path, body in asked:
        response = await server.post(path, body)
        assert response.json()["error"]["code"] == "context_length_exceeded", path
    async with api(redis_url, clamp_max_tokens=True) as clamping:
        for path, body in asked:
            response = await clamping.post(path, body)
            assert response.status_code == 200, (path, response.text)
            spec = worker.specs[-1]
            assert spec.sampling.max_tokens == CARD.context_length - len(spec.prompt_ids)
        full = await clamping.post("/v1/completions", {"prompt": "x" * CARD.context_length, "max_tokens": 1})
        assert full.json()["error"]["code"] == "context_length_exceeded", "no room for any token"


# -- what is drawn and what is told of it


async def test_masks_and_named_log_probabilities_reach_the_worker(server: Api, worker: ScriptedWorker) -> None:
    wanted = ids("ab")
    body = {"allowed_token_ids": [*wanted, wanted[0]], "logprob_token_ids": wanted, "logprobs": 2}
    answer = (await server.post("/v1/completions", {"prompt": "say", **body})).json()
    sampling = worker.specs[-1].sampling
    assert sampling.allowed_token_ids == tuple(sorted(wanted))
    assert (sampling.logprob_token_ids, sampling.top_logprobs) == (tuple(wanted), 0)
    tops = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    assert list(tops.items()) == [("h", -0.25), ("a", -0.5), ("b", -0.5)], "the drawn token comes first, as in vLLM"
    none = {"prompt": "say", "logprobs": 0}  # but the drawn token's
    async with server.stream("/v1/completions", {**none, "stream": True}) as events:
        for shown in ((await events.all())[0], (await server.post("/v1/completions", none)).json()):
            assert shown["choices"][0]["logprobs"]["top_logprobs"][0] == {"h": -0.25}
    await server.post("/v1/chat/completions", {"messages": HELLO, "bad_words": ["no", " never"]})
    assert worker.specs[-1].sampling.bad_words == tuple(tuple(ids(text)) for text in ("no", " no", " never"))
    body = {"token_ids": ids("say"), "sampling_params": {"bad_words": ["x"], "allowed_token_ids": None}}
    await server.post("/inference/v1/generate", body)
    assert worker.specs[-1].sampling.bad_words == (tuple(ids("x")), tuple(ids(" x")))


async def test_the_drawn_token_stands_with_those_that_a_request_names(server: Api, worker: ScriptedWorker) -> None:
    """The worker says "hello", and the log-probabilities of "a" and "h" are wanted: "h" once, "e" besides."""
    expected = [[("a", -0.5), ("h", -0.5)], [("a", -0.5), ("h", -0.5), ("e", -0.25)]]
    chat = {"messages": HELLO, "logprobs": True, "logprob_token_ids": ids("ah")}
    whole = (await server.post("/v1/chat/completions", chat)).json()["choices"][0]["logprobs"]["content"]
    async with server.stream("/v1/chat/completions", chat) as events:
        chunks = [chunk["choices"][0]["logprobs"] for chunk in await events.all()]
    for shown in (whole, [token for chunk in chunks if chunk for token in chunk["content"]]):
        tops = [[(top["token"], top["logprob"]) for top in token["top_logprobs"]] for token in shown]
        assert tops[:2] == expected
    body = {"token_ids": ids("say"), "sampling_params": {"logprobs": 1, "logprob_token_ids": ids("ah")}}
    choice = (await server.post("/inference/v1/generate", body)).json()["choices"][0]
    tops = [
        [(top["token_id"], top["logprob"]) for top in token["top_logprobs"]] for token in choice["logprobs"]["content"]
    ]
    assert tops[:2] == [[(ids(name)[0], logprob) for name, logprob in named] for named in expected]


async def test_a_prompt_is_cut_to_what_the_client_says(server: Api, worker: ScriptedWorker) -> None:
    async def sent(path: str, body: dict[str, Any]) -> str:
        response = await server.post(path, body)
        assert response.status_code == 200, response.text
        return codec().decode(worker.specs[-1].prompt_ids)

    assert await sent("/v1/completions", {"prompt": "abcdef", "truncate_prompt_tokens": 2}) == "ef"
    right = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "truncation_side": "right"}
    assert await sent("/v1/completions", right) == "ab"
    long = {"prompt": "x" * 1000 + "end", "truncate_prompt_tokens": -1, "max_tokens": 6}
    assert await sent("/v1/completions", long) == "x" * (CARD.context_length - 9) + "end"
    chat = {"messages": [{"role": "user", "content": "x" * 1000}], "truncate_prompt_tokens": -1}
    assert (await sent("/v1/chat/completions", chat)).endswith("x\n")
    assert worker.specs[-1].sampling.max_tokens == CARD.context_length // 2
    assert await sent("/v1/embeddings", {"input": "abcdef", "truncate_prompt_tokens": 3}) == "def"
    echoed = {**right, "echo": True, "logprobs": 0}
    assert (await server.post("/v1/completions", echoed)).json()["choices"][0]["text"] == "abhello"


@pytest.mark.parametrize("stream", [False, True])
async def test_special_tokens_are_shown_to_who_asks(redis_url: str, stream: bool) -> None:
    def special(spec: SequenceSpec) -> Answer:
        return Answer("a<start>b")

    async with working(redis_url, special) as worker, api(redis_url) as server:
        for shows, text in ((False, "ab"), (True, "a<start>b")):
            body = {"prompt": "say", "skip_special_tokens": not shows, "logprobs": 0, "stream": stream}
            if stream:
                async with server.stream("/v1/completions", body) as events:
                    choices = [chunk["choices"][0] for chunk in await events.all()]
            else:
                choices = (await server.post("/v1/completions", body)).json()["choices"]
            assert "".join(choice["text"] for choice in choices) == text
            offsets = [at for choice in choices for at in choice["logprobs"]["text_offset"]]
            assert offsets[:3] == ([0, 1, 8] if shows else [0, 1, 1])
        await server.post("/v1/completions", {"prompt": "say", "skip_special_tokens": False, "stop": "x"})
        assert set(worker.specs[-1].sampling.shown_tokens) == {"<eos>", "<start>"}


async def test_log_probabilities_of_the_whole_vocabulary_are_bounded(server: Api, worker: ScriptedWorker) -> None:
    body = {"prompt": "say", "logprobs": -1, "prompt_logprobs": -1}
    answer = await server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    sampling = worker.specs[-1].sampling
    assert sampling.top_logprobs == sampling.prompt_logprobs == CARD.vocab_size
    assert answer.json()["choices"][0]["logprobs"]["top_logprobs"][0] == {"h": -0.25}
    chat = {"messages": HELLO, "logprobs": True, "top_logprobs": -1}
    assert (await server.post("/v1/chat/completions", {**chat, "max_tokens": 9})).status_code == 200
    for path, wrong in (
        ("/v1/completions", {**body, "n": 128}),
        ("/v1/chat/completions", {**chat, "max_tokens": 200, "n": 9}),
    ):
        refused = (await server.post(path, wrong)).json()["error"]
        assert refused["param"] in ("logprobs", "prompt_logprobs"), refused
        assert "logprob_token_ids" in refused["message"]


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "bad_words": ["x"]}, "bad_words"),
    ({"allowed_token_ids": [0], "min_tokens": 2}, "min_tokens"),
    ({"allowed_token_ids": [5], "structured_outputs": {"regex": "a"}}, "allowed_token_ids"),
    ({"bad_words": ["a"], "structured_outputs": {"regex": "a"}}, "bad_words"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids"),
    ({"logprob_token_ids": [10**6], "logprobs": 1}, "logprob_token_ids"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": -1, "stream": True}, "logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"priority": 1}, "priority"),
    ({"request_id": "two words"}, "request_id"),
    ({"request_id": "r", "stream": True, "stream_options": {"include_event_ids": True}}, "request_id"),
]


async def test_what_cannot_be_drawn_or_told_is_refused_by_name(server: Api, worker: ScriptedWorker) -> None:
    for body, param in IMPOSSIBLE:
        response = await server.post("/v1/completions", {"prompt": "say", **body})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), (body, response.text)
    assert not worker.specs


# -- requests by name


async def test_a_request_is_aborted_by_its_name_from_any_api_process(redis_url: str, server: Api) -> None:
    body = {"prompt": "hold", "request_id": "mine", "n": 2}
    async with api(redis_url) as other, server.stream("/v1/completions", body) as events:
        first = await events.next()
        assert first is not None and first["id"] == "cmpl-mine"
        answer = await other.post("/abort_requests", {"request_ids": ["mine", "nobody's", "cmpl-" + "0" * 32]})
        assert answer.json() == {"aborted": ["mine"], "unknown": ["nobody's", "cmpl-" + "0" * 32]}
        chunks = await events.all()
        assert chunks[-1]["error"]["code"] == "cancelled"
    again = (await server.post("/abort_requests", {"request_ids": ["mine"]})).json()
    assert again["unknown"] == ["mine"]


async def test_a_request_is_aborted_by_the_id_of_its_answer(server: Api) -> None:
    async with server.stream("/v1/completions", {"prompt": "hold"}) as events:
        first = await events.next()
        assert first is not None
        assert (await server.post("/abort_requests", {"request_ids": [first["id"]]})).json()["aborted"]
        assert (await events.all())[-1]["error"]["code"] == "cancelled"


async def test_tokens_in_and_out_are_aborted_under_their_own_path(server: Api) -> None:
    body = {"token_ids": ids("hold"), "request_id": "mine", "output_mode": "tokens"}
    async with server.stream("/inference/v1/generate", body) as events:
        first = await events.next()
        assert first is not None
        answer = await server.post("/inference/v1/abort_requests", {"request_ids": [first["request_id"]]})
        assert answer.json()["aborted"] == ["mine"]
        assert (await events.all())[-1]["error"]["code"] == "cancelled"
    refused = await server.post("/inference/v1/generate", {**body, "output_mode": "text"})
    assert refused.json()["error"]["param"] == "output_mode"


async def test_a_name_leaves_nothing_behind_and_two_may_have_it(server: Api, worker: ScriptedWorker) -> None:
    body = {"messages": HELLO, "request_id": "same"}
    both = await asyncio.gather(*(server.post("/v1/chat/completions", body) for _ in range(2)))
    assert [each.json()["id"] for each in both] == ["chatcmpl-same"] * 2
    assert len({spec.id for spec in worker.specs}) == 2
    await settled()
    assert not [key async for key in server.ring.redis.scan_iter("parallm:named:*")]


# -- the workers' caches


async def test_a_reset_waits_for_every_worker_and_names_those_that_do_not_answer(
    server: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.ops.prefix_cache.PATIENCE_S", 0.1)
    silent = await server.http.post("/reset_prefix_cache")  # the scripted worker has no cache, and does not answer
    assert (silent.status_code, "['w1']" in silent.json()["error"]["message"]) == (503, True)


async def test_a_reset_has_nothing_to_wait_for_without_workers(redis_url: str) -> None:
    async with api(redis_url) as lonely:
        assert (await lonely.http.post("/reset_prefix_cache")).json() == {"status": "reset", "workers": []}


# -- what is not to be cached

TEXTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "say"}),
    ("/v1/chat/completions", {"messages": HELLO}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 5}),
    ("/api/chat", {"model": CARD.name, "messages": HELLO, "stream": False}),
    ("/api/generate", {"model": CARD.name, "prompt": "say", "raw": True, "stream": False}),
    ("/generate", {"prompt": "say"}),
    ("/inference/v1/generate", {"token_ids": [5]}),
    ("/v1/embeddings", {"input": "say"}),
]


@pytest.mark.parametrize(("path", "body"), TEXTS, ids=[path for path, _ in TEXTS])
async def test_a_request_may_ask_that_nothing_of_it_be_cached(
    server: Api, worker: ScriptedWorker, path: str, body: dict[str, Any]
) -> None:
    async def cached(fields: dict[str, Any], value: str | None) -> bool:
        response = await server.post(
            path, body | fields, headers={} if value is None else {"X-Parallm-No-Cache": value}
        )
        assert response.status_code == 200, response.text
        return worker.specs[-1].cache

    assert await cached({}, None) and await cached({}, "0")
    assert not await cached({}, "1") and not await cached({}, "True")
    if path != "/inference/v1/generate":  # whose fields are vLLM's
        assert not await cached({"cache": False}, None) and await cached({"cache": True}, None)
    refused = await server.post(path, body, headers={"X-Parallm-No-Cache": "maybe"})
    assert refused.status_code == 400 and "x-parallm-no-cache" in refused.text


async def test_a_response_in_the_background_is_not_cached_either(server: Api, worker: ScriptedWorker) -> None:
    begun = await server.post("/v1/responses", {"input": "hi", "background": True, "cache": False})
    assert begun.status_code == 200, begun.text
    await wait_until(lambda: len(worker.specs) == 1)
    assert not worker.specs[0].cache


@pytest.mark.parametrize("by_header", [False, True])
async def test_a_job_s_sequences_are_not_cached_either(server: Api, by_header: bool) -> None:
    body = {"kind": "generate", "prompts": ["a"], "model": CARD.name}
    asked = {"headers": {"X-Parallm-No-Cache": "1"}} if by_header else {}
    made = await server.post("/v1/jobs", body if by_header else {**body, "cache": False}, **asked)
    assert made.status_code == 202, made.text
    job = await server.ring.jobs.spec(made.json()["id"])
    assert not job.cache
    both = await server.post("/v1/jobs", {**body, "cache": False, "has_next_turn": True})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "has_next_turn")
