"""Files and batches through the openai client, on a real ring; processes are killed while a batch runs."""

import asyncio
import contextlib
import json
import math
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.openai_shapes import exact
from tests.e2e.rings import MODEL, Ring, ring
from tests.waiting import HANG_S, wait_until

ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    with ring(tmp_path_factory.mktemp("ring")) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Ring) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.openai_url, api_key="none", max_retries=0) as client:
        yield client


def until(condition: Callable[[], bool]) -> None:
    asyncio.run(wait_until(condition))


def line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **body}}


def chat_line(custom_id: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"say {custom_id}"}]
    return line(custom_id, "/v1/chat/completions", **{"messages": messages, "max_tokens": 8, "temperature": 0, **more})


def upload(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    data = "".join(json.dumps(each) + "\n" for each in lines).encode()
    return client.files.create(file=("requests.jsonl", data), purpose="batch").id


def create(client: openai.OpenAI, lines: list[dict[str, Any]]) -> Any:
    url = lines[0]["url"]
    return client.batches.create(input_file_id=upload(client, lines), endpoint=url, completion_window="24h")


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    until(lambda: client.batches.retrieve(batch_id).status in ENDED)
    return client.batches.retrieve(batch_id)


def read(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """Lines by custom id; each comes once."""
    assert file_id is not None
    lines = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


def same(body: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from call to call."""
    usage = {k: v for k, v in body.get("usage", {}).items() if not k.endswith("details")}
    return {k: v for k, v in body.items() if k not in ("id", "created", "usage")} | {"usage": usage}


def alike(ours: Any, theirs: Any) -> bool:
    """Equal, numbers up to rounding: rows are computed beside other rows."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(alike(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-2, abs_tol=1e-3)
    return bool(ours == theirs)


def test_a_batch_answers_what_the_endpoints_answer(client: openai.OpenAI) -> None:
    chats = [
        chat_line("plain"),
        chat_line("thrice", n=3, temperature=1, seed=7),
        chat_line("logprobs", logprobs=True, top_logprobs=2),
        chat_line("json", response_format={"type": "json_object"}, max_tokens=30),
        chat_line("stopped", stop=["e"], max_tokens=30),
    ]
    texts = [
        line("text", "/v1/completions", prompt="once upon", max_tokens=8, temperature=0, echo=True, logprobs=0),
        line("ids", "/v1/completions", prompt=[5, 6, 7], max_tokens=8, seed=3, return_token_ids=True),
        line("lists", "/v1/completions", prompt=["once", "twice"], n=2, max_tokens=4, seed=5),
        line("rivals", "/v1/completions", prompt="once upon", max_tokens=2, temperature=0, echo=True, logprobs=2),
        line("scored", "/v1/completions", prompt="once upon", max_tokens=0, echo=True, logprobs=0),
    ]
    vectors = [
        line("floats", "/v1/embeddings", input="once upon"),
        line("list", "/v1/embeddings", input=["once", "upon", "a time"]),
        line("packed", "/v1/embeddings", input="a time", dimensions=4, pooling="last"),
    ]
    for lines in (chats, texts, vectors):
        batch = ended(client, create(client, lines).id)
        assert (batch.status, batch.errors) == ("completed", None)
        assert batch.error_file_id is None
        assert batch.request_counts.model_dump() == {"total": len(lines), "completed": len(lines), "failed": 0}
        exact(openai.types.Batch, batch.model_dump())
        answers = read(client, batch.output_file_id)
        exact(openai.types.FileObject, client.files.retrieve(batch.output_file_id).model_dump())
        spent = [answer["response"]["body"]["usage"] for answer in answers.values()]
        assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in spent) > 0
        assert batch.usage.output_tokens == sum(each.get("completion_tokens", 0) for each in spent)
        assert list(answers) == [each["custom_id"] for each in lines]
        for each in lines:
            answer = answers[each["custom_id"]]
            assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
            direct = client.post(each["url"].removeprefix("/v1"), body=each["body"], cast_to=dict)
            assert alike(same(answer["response"]["body"]), same(direct)), (answer, direct)


def test_a_refused_line_fails_alone_and_a_malformed_one_fails_the_batch(client: openai.OpenAI) -> None:
    lines = [
        chat_line("good"),
        chat_line("streamed", stream=True),
        chat_line("late", deadline_s=1),
        chat_line("unknown", colour="red"),
        chat_line("long", max_tokens=10**6),
        chat_line("other", model="other"),
    ]
    batch = ended(client, create(client, lines).id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (6, 1, 5)
    assert list(read(client, batch.output_file_id)) == ["good"]
    refused = read(client, batch.error_file_id)
    params = {name: each["response"]["body"]["error"]["param"] for name, each in refused.items()}
    assert params == {
        "streamed": "stream",
        "late": "deadline_s",
        "unknown": "colour",
        "long": "max_tokens",
        "other": "model",
    }
    assert {each["response"]["status_code"] for each in refused.values()} == {400}

    twice = [chat_line("same"), chat_line("same"), {**chat_line("get"), "method": "GET"}, {"custom_id": "bare"}]
    failed = ended(client, create(client, twice).id)
    assert failed.status == "failed"
    assert [(each.line, each.code) for each in failed.errors.data] == [
        (2, "duplicate_custom_id"), (3, "invalid_method"), *[(4, "missing_required_parameter")] * 3,
    ]  # fmt: skip


def test_a_batch_whose_processes_die_in_every_state_has_each_line_once(served: Ring) -> None:
    """A longer run with more kills: python -m tests.e2e.batch_kills."""
    rng = random.Random(5)
    lines = [
        chat_line(f"line {i}", max_tokens=4 + i % 24, **({"colour": "red"} if i % 50 == 7 else {})) for i in range(1500)
    ]
    states: list[str] = []
    with openai.OpenAI(base_url=served.openai_url, api_key="none", max_retries=20) as client:
        file = upload(client, lines)
        asked = {"endpoint": lines[0]["url"], "completion_window": "24h"}
        again: Any = {"input_file_id": file, **asked, "extra_headers": {"Idempotency-Key": "killed"}}
        batch = client.batches.create(**again)

        def reached(state: str, done: int = 0) -> bool:
            found = client.batches.retrieve(batch.id)
            states.append(found.status)
            counts = found.request_counts
            return found.status == state and counts.completed + counts.failed >= done

        time.sleep(rng.uniform(0, 0.3))
        kill(served, "api")
        assert client.batches.create(**again).id == batch.id  # its answer might have been lost
        for victim, done in (("worker", 100), ("worker.jobs", 600)):
            until(lambda done=done: reached("in_progress", done))  # type: ignore[misc]
            kill(served, victim)
        until(lambda: reached("finalizing"))
        time.sleep(rng.uniform(0, 1.2))
        kill(served, "api")
        until(lambda: reached("completed"))

        done = client.batches.retrieve(batch.id)
        answered, refused = read(client, done.output_file_id), read(client, done.error_file_id)
        assert (
            (done.request_counts.completed, done.request_counts.failed) == (len(answered), len(refused)) == (1470, 30)
        )
        assert answered.keys() | refused.keys() == {each["custom_id"] for each in lines}
        assert {each["response"]["status_code"] for each in refused.values()} == {400}
        order = ["validating", "in_progress", "finalizing", "completed"]
        assert [order.index(state) for state in states] == sorted(map(order.index, states))
        assert client.batches.retrieve(batch.id) == done
        jobs = httpx.get(f"{served.url}/v1/jobs", timeout=HANG_S).json()["data"]
        assert [job["metadata"]["batch"] for job in jobs].count(batch.id) == 1


def kill(served: Ring, module: str) -> None:
    """The child of the server that runs this module, with SIGKILL; the server starts it again."""
    for child in psutil.Process(served.server.popen.pid).children():
        if child.cmdline()[1:3] == ["-m", module]:
            child.send_signal(signal.SIGKILL)
            return
    raise AssertionError(f"no {module}")


def test_cancel_keeps_what_is_done(client: openai.OpenAI) -> None:
    lines = [chat_line(f"line {i}", max_tokens=40, ignore_eos=True) for i in range(1500)]
    batch = create(client, lines)
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch.id)
    assert done.status == "cancelled"
    kept, rest = read(client, done.output_file_id), read(client, done.error_file_id)
    assert len(kept) == done.request_counts.completed > 0
    assert kept.keys() | rest.keys() == {each["custom_id"] for each in lines}
    assert len(kept) + len(rest) == len(lines)
    assert {each["error"]["code"] for each in rest.values()} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_files_are_listed_paged_read_and_deleted(client: openai.OpenAI) -> None:
    ids = [upload(client, [chat_line(name)]) for name in ("a", "b")]
    found = client.files.retrieve(ids[0])
    assert (found.filename, found.purpose, found.status) == ("requests.jsonl", "batch", "processed")
    assert found.bytes == len(client.files.content(ids[0]).content)
    assert set(ids) <= {each.id for each in client.files.list(purpose="batch", limit=1)}
    assert client.files.delete(ids[0]).deleted
    for gone in (lambda: client.files.retrieve(ids[0]), lambda: client.files.content("../../etc/passwd")):
        with contextlib.suppress(openai.NotFoundError):
            gone()
            raise AssertionError("found")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"x", purpose="nonsense")  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=ids[0], endpoint="/v1/completions", completion_window="24h")
    assert len(list(client.batches.list(limit=2))) >= 5


def test_a_file_lives_as_long_as_it_says(client: openai.OpenAI) -> None:
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=b"{}\n", purpose="batch", expires_after=expires)
    assert file.expires_at == file.created_at + 3600


def test_a_name_with_a_path_is_only_a_name(client: openai.OpenAI, tmp_path: Path) -> None:
    file = client.files.create(file=("../../" + str(tmp_path / "x.jsonl"), b"{}\n"), purpose="batch")
    assert file.filename == "x.jsonl"
    assert not list(tmp_path.iterdir())
