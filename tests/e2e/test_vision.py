"""Images over HTTP: a small model that sees, with random weights, through the openai client and a real ring."""

import asyncio
import base64
import contextlib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI
from PIL import Image

pytest.importorskip("mlx_vlm")

from api.tinker.protobuf import MESSAGE
from tests.e2e.bad_images import Sent, attack, bodies
from tests.e2e.rings import MODEL, Ring, ring
from tests.engine.vision_models import alone, codec, picture, png, whole_model, write_vision_model
from tests.waiting import HANG_S, wait_until

SIZES = [picture(seed).size for seed in (5, 6)]
INPUTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    folder = write_vision_model(tmp_path_factory.mktemp("model") / MODEL)
    with ring(tmp_path_factory.mktemp("ring"), "--learners", "2", model=folder) as started:
        yield started


@pytest.fixture
def client(served: Ring) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.openai_url, api_key="none", max_retries=0) as made:
        yield made


def shown(seed: int, **more: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(png(picture(seed))).decode()
    return {"type": "image_url", "image_url": {"url": url, **more}}


def ask(client: OpenAI, *parts: dict[str, Any] | str, **fields: Any) -> Any:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    defaults = {"model": MODEL, "max_tokens": 6, "temperature": 0, "extra_body": {"return_token_ids": True}}
    return client.chat.completions.create(messages=[{"role": "user", "content": content}], **(defaults | fields))


def test_chats_with_images_say_what_mlx_vlm_says_and_text_goes_on_beside_them(client: OpenAI) -> None:
    asked = [("What?", shown(1)), ("What?", shown(2)), ("No picture",), ("A", shown(1), "B", shown(3), "C")]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda parts: ask(client, *parts), asked))
    model = whole_model("smolvlm")
    for answer, seeds in zip(answers, ([1], [2], [], [1, 3]), strict=True):
        prompt = tuple(answer.prompt_token_ids)
        assert answer.usage.prompt_tokens == len(prompt)
        said = alone(model, prompt, [picture(seed) for seed in seeds], 6)
        assert answer.choices[0].token_ids == said[: len(answer.choices[0].token_ids)]
    shown_text = codec().decode(answers[0].prompt_token_ids, skip_special_tokens=False)
    assert shown_text.startswith("user:What?<fake_token_around_image><row_1_col_1><image><image><image><image>")


def test_images_of_any_turn_are_seen_and_low_detail_is_one_tile(client: OpenAI) -> None:
    first = {"role": "user", "content": [shown(1), {"type": "text", "text": "What?"}]}
    later = {"role": "user", "content": [{"type": "text", "text": "And"}, shown(2), shown(3)]}
    asked = {"model": MODEL, "max_tokens": 6, "temperature": 0, "extra_body": {"return_token_ids": True}}
    reply = {"role": "assistant", "content": "A sea."}
    answer = client.chat.completions.create(messages=[first, reply, later], **asked)  # type: ignore[call-overload]
    said = alone(whole_model("smolvlm"), tuple(answer.prompt_token_ids), [picture(seed) for seed in (1, 2, 3)], 6)
    assert answer.choices[0].token_ids == said[: len(answer.choices[0].token_ids)]
    low, auto, high = (
        ask(client, "What?", shown(1, detail=detail)).usage.prompt_tokens for detail in ("low", "auto", "high")
    )
    assert low < auto == high


def test_an_image_of_a_tools_result_is_seen_in_every_protocol(client: OpenAI, served: Ring) -> None:
    url, call = shown(7)["image_url"]["url"], {"id": "c", "name": "look"}
    function = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [function]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a.png"}, shown(7)]},
    ]
    asked = {"model": MODEL, "max_tokens": 6, "temperature": 0, "extra_body": {"return_token_ids": True}}
    answer = client.chat.completions.create(messages=messages, **asked)  # type: ignore[call-overload]
    said = alone(whole_model("smolvlm"), tuple(answer.prompt_token_ids), [picture(7)], 6)
    assert answer.choices[0].token_ids == said[: len(answer.choices[0].token_ids)]
    text, length = answer.choices[0].message.content, answer.usage.prompt_tokens

    messages[2]["content"][1] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=messages, **asked)  # type: ignore[call-overload]
    assert refused.value.param == "messages[2].content[1]", "where the client has put it"

    def post(path: str, **body: Any) -> httpx.Response:
        return httpx.post(served.url + path, json={"model": MODEL, **body}, timeout=HANG_S)

    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a.png"}, block(7)]}
    use = [{"type": "text", "text": "I look."}, {"type": "tool_use", **call, "input": {}}]
    turns = [messages[0], {"role": "assistant", "content": use}, {"role": "user", "content": [result]}]
    message = post("/v1/messages", messages=turns, max_tokens=6, temperature=0)
    output = [{"type": "input_text", "text": "a.png"}, {"type": "input_image", "image_url": url}]
    items = [
        messages[0],
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    response = post("/v1/responses", input=items, max_output_tokens=16, temperature=0)
    bad = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    follows = {"previous_response_id": response.json()["id"]}
    wrong = post("/v1/responses", input=[{"role": "user", "content": [output[1], bad]}, *items])
    assert wrong.json()["error"]["param"] == "input[0].content[1]", "where the client has put it"
    for path, more in (("/v1/responses", follows), ("/v1/responses/input_tokens", follows), ("/v1/responses", {})):
        later = post(path, input=[items[2], {**items[3], "output": [*output, bad]}], **more).json()["error"]
        assert later["param"] == "input[1].output[2]", "where the client has put it"
    calls = [{"function": {"name": "look", "arguments": {}}}]
    spoken = [
        messages[0],
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "content": "a.png", "images": [url], "tool_name": "look"},
    ]
    turn = {**spoken[2], "images": [url, "AAAA"]}
    wrong = post("/api/chat", messages=[*spoken[:2], turn], stream=False)
    assert wrong.json()["error"].startswith("messages[2].images[1]: "), "where the client has put it"
    line = post("/api/chat", messages=spoken, stream=False, options={"num_predict": 6, "temperature": 0})
    for each in (message, response, line):
        assert each.status_code == 200, each.text
    assert sum(message.json()["usage"][name] for name in INPUTS) == length
    assert message.json()["content"][0]["text"] == line.json()["message"]["content"] == text
    assert response.json()["usage"]["input_tokens"] == line.json()["prompt_eval_count"] == length
    assert response.json()["output"][0]["content"][0]["text"].startswith(text)


async def test_an_image_that_was_seen_is_not_encoded_again(client: OpenAI, served: Ring) -> None:
    for _ in range(3):
        ask(client, "Again?", shown(9), n=2)
    await wait_until(lambda: figure(served, "images_known") >= 5)
    assert figure(served, "images_encoded") < figure(served, "images_known")


def figure(served: Ring, name: str) -> float:
    text = httpx.get(served.url + "/metrics").text
    found = re.search(rf"^mlx_parallm_{name}_total{{.*}} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_files_and_responses_bring_the_same_image(client: OpenAI, served: Ring) -> None:
    said = ask(client, "What?", shown(4)).choices[0].message.content
    file = client.files.create(file=("a.png", png(picture(4))), purpose="user_data")
    assert ask(client, "What?", {"type": "file", "file": {"file_id": file.id}}).choices[0].message.content == said
    content = [
        {"type": "input_text", "text": "What?"},
        {"type": "input_image", "image_url": shown(4)["image_url"]["url"], "detail": "auto"},
    ]
    answer = client.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
        temperature=0,
        max_output_tokens=16,
    )
    assert answer.output_text.startswith(said)
    again = client.responses.create(
        model=MODEL, input="And now?", previous_response_id=answer.id, temperature=0, max_output_tokens=16
    )
    assert again.usage is not None and again.usage.input_tokens > 60, "the image is part of the history"


def test_jobs_and_batches_see_what_a_chat_sees_and_keep_images_of_their_own(client: OpenAI, served: Ring) -> None:
    said = ask(client, "A", shown(5), "B", shown(6), "C").choices[0].message.content
    file = client.files.create(file=("a.png", png(picture(6))), purpose="user_data")
    text = [{"type": "text", "text": each} for each in "ABC"]
    parts = [text[0], shown(5), text[1], {"type": "file", "file": {"file_id": file.id}}, text[2]]
    messages = [{"role": "user", "content": parts}]
    job = {"kind": "rollout", "model": MODEL, "n": 2, "max_tokens": 6, "temperature": 0, "reward": {"name": "exact"}}
    lines = [{"messages": messages, "reference": said}, "text alone"]
    form = {"spec": json.dumps(job)}
    files = {"file": ("a.jsonl", "\n".join(map(json.dumps, lines)))}
    jobs = [httpx.post(served.url + "/v1/jobs", data=form, files=files).json()["id"]]
    body = {**job, "prompts": [messages], "references": [said]}
    jobs.append(httpx.post(served.url + "/v1/jobs", json=body).json()["id"])
    asked = {"model": MODEL, "max_tokens": 6, "temperature": 0, "messages": messages}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": asked}
    batch = client.batches.create(
        input_file_id=client.files.create(file=("b.jsonl", json.dumps(line).encode()), purpose="batch").id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    by_now(lambda: client.batches.retrieve(batch.id).status != "validating")
    client.files.delete(file.id)  # what has been taken in needs it no more
    for each in jobs:
        by_now(lambda job=each: httpx.get(f"{served.url}/v1/jobs/{job}").json()["status"] == "succeeded")
        results = httpx.get(f"{served.url}/v1/jobs/{each}/results").text.splitlines()
        samples = [json.loads(result) for result in results]
        assert [sample["text"] for sample in samples[:2]] == [said] * 2
        assert samples[0]["reward"]["value"] == 1.0
        page = httpx.get(f"{served.url}/dashboard/jobs/{each}/samples/0").text
        shown_images = re.findall(r'<img src="(/dashboard/jobs/[^"]+)"', page)
        assert [read_size(httpx.get(served.url + found).content) for found in shown_images] == SIZES
    assert httpx.get(served.url + shown_images[0][:-1] + "x").status_code == 404
    by_now(lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.batches.retrieve(batch.id).output_file_id
    assert output is not None
    answer = json.loads(client.files.content(output).text)["response"]["body"]
    assert answer["choices"][0]["message"]["content"] == said


def read_size(file: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(file)).size


def by_now(condition: Callable[[], bool]) -> None:
    asyncio.run(wait_until(condition))


def block(seed: int) -> dict[str, Any]:
    data = base64.b64encode(png(picture(seed))).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_anthropics_messages_see_the_same_images(client: OpenAI, served: Ring) -> None:
    file = client.files.create(file=("a.png", png(picture(3))), purpose="user_data")
    content = [{"type": "text", "text": "A"}, block(1), {"type": "text", "text": "B"}]
    content += [{"type": "image", "source": {"type": "file", "file_id": file.id}}, {"type": "text", "text": "C"}]
    asked = {"model": MODEL, "max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    answer = httpx.post(served.url + "/v1/messages", json=asked).json()
    assert answer["content"][0]["text"] == ask(client, "A", shown(1), "B", shown(3), "C").choices[0].message.content
    uncounted = {"max_tokens", "temperature"}
    count = {name: value for name, value in asked.items() if name not in uncounted}
    counted = httpx.post(served.url + "/v1/messages/count_tokens", json=count)
    assert counted.json()["input_tokens"] == sum(answer["usage"][name] for name in INPUTS)
    content[1]["source"]["data"] = "AAAA"
    refused = httpx.post(served.url + "/v1/messages", json=asked)
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith("messages[0].content[1]: ")


class Tinker:
    """Its routes as the JSON of its SDK has them (tests/clients has the SDK itself)."""

    def __init__(self, served: Ring) -> None:
        self._url = served.url + "/api/v1/"
        self.session = self.ask("create_session")["session_id"]
        named = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": MODEL}
        self.sampler = self.ask("create_sampling_session", **named)["sampling_session_id"]
        self._samples = itertools.count()

    def ask(self, route: str, status: int = 200, **body: Any) -> dict[str, Any]:
        answer = httpx.post(self._url + route, json=body, timeout=HANG_S)
        assert answer.status_code == status, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def done(self, placed: dict[str, Any]) -> httpx.Response:
        """What comes of it; the SDK polls in this way."""
        while True:
            asked = {"request_id": placed["request_id"]}
            answer = httpx.post(self._url + "retrieve_future", json=asked, timeout=HANG_S)
            if answer.status_code != 408:
                return answer

    def sample(self, chunks: list[dict[str, Any]], status: int = 200, **more: Any) -> dict[str, Any]:
        params = {"max_tokens": 6, "temperature": 0, "stop": []}
        named = {"sampling_session_id": self.sampler, "seq_id": next(self._samples), "sampling_params": params}
        return self.ask("asample", status, prompt={"chunks": chunks}, **named, **more)


def chunks_of(ids: list[int], image: dict[str, Any]) -> list[dict[str, Any]]:
    """A chat's prompt with a chunk in the place of what its template has written for the image."""
    fake = codec().token_to_id("<fake_token_around_image>")
    places = [at for at, token in enumerate(ids) if token == fake]
    start, end = places[0], places[-1] + 1
    texts = [{"type": "encoded_text", "tokens": each} for each in (ids[:start], ids[end:])]
    return [texts[0], {**image, "expected_tokens": end - start}, texts[1]]


def image_chunk(seed: int) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(png(picture(seed))).decode(), "format": "png"}


def test_tinkers_samples_and_passes_see_what_a_chat_sees(client: OpenAI, served: Ring) -> None:
    chat, tinker = ask(client, "What?", shown(1), "Say.", max_tokens=6), Tinker(served)
    prompt, said = list(chat.prompt_token_ids), list(chat.choices[0].token_ids)
    chunks = chunks_of(prompt, image_chunk(1))
    message = MESSAGE["SampleResponse"]()
    message.ParseFromString(tinker.done(tinker.sample(chunks, num_samples=2)).content)
    for sequence in message.sequences:
        assert np.frombuffer(sequence.tokens, "<i4").tolist()[: len(said)] == said
    model = {
        "session_id": tinker.session,
        "model_seq_id": 0,
        "base_model": MODEL,
        "lora_config": {"rank": 4, "seed": 5},
    }
    made = tinker.ask("create_model", **model)
    whole = [*prompt, 7, 8, 9]
    tensors = {
        "target_tokens": {"data": whole[1:], "dtype": "int64"},
        "weights": {"data": [0.0] * (len(prompt) - 1) + [1.0] * 3, "dtype": "float32"},
    }
    chunks[-1]["tokens"] += [7, 8]
    datum = {"model_input": {"chunks": chunks}, "loss_fn_inputs": tensors}
    numbers, losses = itertools.count(1), []

    def asked(**datum: Any) -> dict[str, Any]:
        given = {"data": [datum], "loss_fn": "cross_entropy"}
        return {"model_id": made["model_id"], "seq_id": next(numbers), "forward_backward_input": given}

    for _ in range(3):
        placed = tinker.ask("forward_backward", **asked(**datum))
        stepped = {"model_id": made["model_id"], "seq_id": next(numbers), "adam_params": {"learning_rate": 0.01}}
        assert "metrics" in tinker.done(tinker.ask("optim_step", **stepped)).json()
        losses.append(tinker.done(placed).json()["metrics"]["loss:sum"])
    assert losses[2] < losses[1] < losses[0]
    other = {"chunks": [image_chunk(2) if each["type"] == "image" else each for each in chunks]}
    seen = []
    for model_input in (datum["model_input"], other):
        placed = tinker.ask("forward", **asked(model_input=model_input, loss_fn_inputs=tensors))
        seen.append(tinker.done(placed).json()["metrics"]["loss:sum"])
    assert seen[0] < losses[2] and seen[1] != pytest.approx(seen[0], rel=1e-3), "by the same weights"


def test_tinkers_bad_chunks_are_refused_by_name_and_take_their_number(client: OpenAI, served: Ring) -> None:
    prompt, tinker = list(ask(client, "What?", shown(1), "Say.").prompt_token_ids), Tinker(served)
    chunks = chunks_of(prompt, image_chunk(1))
    count, last = chunks[1]["expected_tokens"], chunks[-1]["tokens"]

    def with_chunk(**changes: Any) -> list[dict[str, Any]]:
        return [chunks[0], {**chunks[1], **changes}, chunks[2]]

    pointer = {"type": "image_asset_pointer", "format": "png"}
    many = [each for _ in range(17) for each in (chunks[1], chunks[2])]
    huge = base64.b64encode(bytes(11 << 20)).decode()
    bad: list[tuple[str, list[dict[str, Any]]]] = [
        (f"comes to {count} tokens", with_chunk(expected_tokens=count - 1)),
        ("prompt.chunks[1]", with_chunk(data="AAAA")),
        ("damaged", with_chunk(data="@")),
        ("--max-image-bytes", with_chunk(data=huge, expected_tokens=None)),
        ("17 images", many),
        ("https", [{**pointer, "location": "file:///etc/passwd"}, chunks[2]]),
        ("does not fetch", [{**pointer, "location": "https://169.254.169.254/a.png"}, chunks[2]]),
        ("cannot be distinguished", [{"type": "encoded_text", "tokens": prompt}, *chunks]),
        ("format", with_chunk(format="svg")),
        ("expected_tokens", with_chunk(expected_tokens=-1)),
        ("dmel", with_chunk(type="dmel")),
        ("takes up to", [chunks[0], chunks[1], {"type": "encoded_text", "tokens": last * 4000}]),
    ]
    for words, given in bad:
        refused = tinker.sample(given, 400)["error"]
        assert words in refused["message"] or words in str(refused["param"]), (words, refused)
    assert "images" in tinker.sample(chunks, 400, prompt_logprobs=True)["error"]["message"]
    model = {"session_id": tinker.session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    made = tinker.ask("create_model", **model)["model_id"]
    tensors = {
        "target_tokens": {"data": prompt, "dtype": "int64"},
        "weights": {"data": [1.0] * len(prompt), "dtype": "float32"},
    }
    worse = [*bad[:4], *bad[5:10], ("target_tokens of shape", chunks[1:])]
    for at, (words, given) in enumerate(worse, 1):
        datum = {"model_input": {"chunks": given}, "loss_fn_inputs": tensors}
        asked = {"data": [datum], "loss_fn": "cross_entropy"}
        refused = tinker.ask("forward_backward", 400, model_id=made, seq_id=at, forward_backward_input=asked)["error"]
        assert words in refused["message"] or words.removeprefix("prompt.") in str(refused["param"]), (words, refused)
    datum = {"model_input": {"chunks": chunks}, "loss_fn_inputs": tensors}
    asked = {"data": [datum], "loss_fn": "cross_entropy"}
    placed = tinker.ask("forward_backward", model_id=made, seq_id=len(worse) + 1, forward_backward_input=asked)
    assert "loss:sum" in tinker.done(placed).json()["metrics"]
    drawn = [*chunks[:2], {"type": "encoded_text", "tokens": [*last[:-1], codec().token_to_id("<image>")]}]
    datum = {"model_input": {"chunks": drawn}, "loss_fn_inputs": tensors}
    asked = {"data": [datum], "loss_fn": "cross_entropy"}
    placed = tinker.ask("forward_backward", model_id=made, seq_id=len(worse) + 2, forward_backward_input=asked)
    assert "loss:sum" in tinker.done(placed).json()["metrics"]
    begun = tinker.sample(chunks, num_samples=4)
    tinker.ask("cancel_future", request_id=begun["request_id"])
    assert tinker.done(begun).status_code == 410


async def test_damaged_pictures_among_good_ones_are_answered_and_lose_nobody(served: Ring) -> None:
    counts = await attack(served.url, MODEL, 120)
    assert {status for kind, status in counts if kind == "noise"} == {400}
    assert counts["good", 200] > 10 and any(counts[kind, 200] for kind in ("whole", "turned"))


async def test_clients_that_leave_amid_their_pictures_take_no_place_with_them(client: OpenAI, served: Ring) -> None:
    """Sixteen in one moment, of which the first holds a place of the processes that decode files."""
    async with httpx.AsyncClient(base_url=served.url, timeout=HANG_S) as leaving, asyncio.TaskGroup() as group:
        for seed in range(100, 116):
            _, body = bodies(MODEL, Sent("", png(picture(seed, 900, 900))))[0]
            group.create_task(left(leaving, body))
    assert ask(client, "What?", shown(60), timeout=HANG_S).usage.prompt_tokens > 20


async def left(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        await client.post("/v1/chat/completions", json=body, timeout=httpx.Timeout(60, read=0.05))


def test_what_is_no_image_is_a_400_that_names_it(client: OpenAI) -> None:
    for url in ("data:image/png;base64,AAAA", "data:image/png;base64,@", "https://example.com/a.png", "x", ""):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, "What?", {"type": "image_url", "image_url": {"url": url}})
        assert refused.value.param == "messages[0].content[1]", url
    with pytest.raises(openai.BadRequestError, match="own mark"):
        ask(client, "<image>", shown(1))
    with pytest.raises(openai.BadRequestError, match="17 images"):
        ask(client, *[shown(1)] * 17)
    with pytest.raises(openai.BadRequestError, match="does not go with images"):
        ask(client, shown(1), extra_body={"prompt_logprobs": 1})
    with pytest.raises(openai.NotFoundError):
        ask(client, {"type": "file", "file": {"file_id": "file-none"}})


def test_endpoints_that_take_no_images_say_so(served: Ring) -> None:
    body = {"messages": [{"role": "user", "content": [shown(1)]}], "model": MODEL}
    for path in ("/tokenize", "/v1/chat/completions/render"):
        answer = httpx.post(served.url + path, json=body)
        assert answer.status_code == 400 and "not here" in answer.text, path
