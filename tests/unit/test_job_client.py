"""The client and the `mlx_parallm` command against a scripted server."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

import api.cli.client
from api.cli import chat, console
from api.cli import main as cli
from api.cli.batch_client import BatchClient
from api.cli.client import InferenceClient, JobRequest
from api.cli.http import RequestFailedError
from shared.jobs import JobCounts, JobInput, JobStatus, JobUsage, RewardSpec
from tests.waiting import HANG_S

Handler = Callable[[httpx.Request], httpx.Response]


def status(state: str = "succeeded", done: int = 4, total: int = 4, **fields: Any) -> dict[str, Any]:
    counts = JobCounts(total, 0, total - done if state == "running" else 0, done, 0, 0, 0)
    values: dict[str, Any] = {
        "id": "job-1", "kind": "rollout", "model": "m", "status": state, "counts": counts, "progress": done / total,
        "usage": JobUsage(10, 20), "mean_reward": 0.5, "reward_errors": 0, "created_ms": 1, "started_ms": 1000,
        "finished_ms": 3000, "complete_through": done, "error": "", "metadata": {}, "n": 2,
    }  # fmt: skip
    built: dict[str, Any] = msgspec.to_builtins(JobStatus(**{**values, **fields}))
    return built


def line(ordinal: int, text: str = "hi") -> str:
    trajectory = {"prompt_index": ordinal // 2, "sample_index": ordinal % 2, "prompt_ids": [1], "completion_ids": [2]}
    return json.dumps({**trajectory, "text": text, "logprobs": [-0.5], "finish_reason": "stop"}, ensure_ascii=False)


def client(handler: Handler, **options: Any) -> InferenceClient:
    return InferenceClient("http://test", transport=httpx.MockTransport(handler), **options)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Handler], None]:
    def use(handler: Handler) -> None:
        def make(url: str, **options: Any) -> BatchClient:
            return BatchClient("http://test", transport=httpx.MockTransport(handler), **options)

        monkeypatch.setattr(console, "BatchClient", make)

    return use


async def test_submit_uploads_lines_and_repeats_under_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        bodies.append(request.read())
        if len(bodies) == 1:
            raise httpx.ConnectError("restarting")
        if len(bodies) == 2:
            return httpx.Response(503, headers={"retry-after": "0.01"}, json={"error": {"message": "busy"}})
        return httpx.Response(202, json=status("queued", 0))

    async with client(handler) as http:
        request = JobRequest(kind="rollout", model="m", n=2, reward=RewardSpec("exact"))
        answer = await http.submit(request, [JobInput("a", reference="b"), {"prompt": "c"}])
    assert answer.status == "queued"
    assert b'{"prompt":"a","reference":"b"}\n{"prompt":"c"}\n' in bodies[2]
    keys = {json.loads(body.split(b"\r\n\r\n")[1].split(b"\r\n")[0])["idempotency_key"] for body in bodies}
    assert len(keys) == 1 and keys.pop()


async def test_results_are_followed_without_gaps() -> None:
    looks = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal looks
        if request.url.path == "/v1/jobs/job-1":
            looks += 1
            state = ("running", 0), ("running", 2), ("running", 2), ("succeeded", 4)
            return httpx.Response(200, json=status(*state[min(looks, 4) - 1]))
        after = int(request.url.params["after"])
        there = [0, 1, 3] if looks < 4 else [0, 1, 2, 3]  # 3 is finished before 2
        return httpx.Response(200, text="".join(line(o) + "\n" for o in there if o > after))

    async with client(handler) as http:
        ordinals = [t.prompt_index * 2 + t.sample_index async for t in http.results("job-1", follow=True)]
    assert ordinals == [0, 1, 2, 3]


async def test_results_of_a_cancelled_job_have_gaps_and_end() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/jobs/job-1":
            return httpx.Response(200, json=status("cancelled", 1))
        after = int(request.url.params["after"])
        return httpx.Response(200, text="".join(line(o) + "\n" for o in (0, 3) if o > after))

    async with client(handler) as http:
        assert [t.sample_index async for t in http.results("job-1")] == [0, 1]


async def test_lines_are_split_at_newlines_only() -> None:
    text = "a\u2028b\u0085c"

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/jobs/job-1":
            return httpx.Response(200, json=status(done=1, total=1))
        after = int(request.url.params["after"])
        return httpx.Response(200, content=(line(0, text) + "\n").encode() if after < 0 else b"")

    async with client(handler) as http:
        assert [t.text async for t in http.results("job-1")] == [text]


async def test_chat_streams_text() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.read())["stream"] is True
        events = [{"choices": [{"delta": {"content": part}}]} for part in ("Hel", "lo")]
        body = ": ping\n\n" + "".join(f"data: {json.dumps(e)}\n\n" for e in [*events, {"choices": []}])
        return httpx.Response(200, text=body + "data: [DONE]\n\n")

    async with client(handler) as http:
        assert [part async for part in http.chat("m", [{"role": "user", "content": "x"}])] == ["Hel", "lo"]


async def test_an_error_in_the_stream_is_raised() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'data: {"error": {"message": "engine died"}}\n\n'

    async with client(lambda request: httpx.Response(200, content=body())) as http:
        with pytest.raises(RequestFailedError, match="engine died"):
            assert [part async for part in http.chat("m", [])]


async def test_wait_reports_progress_and_times_out() -> None:
    seen: list[float] = []
    async with client(lambda request: httpx.Response(200, json=status("running", 1))) as http:
        with pytest.raises(TimeoutError, match="still running"):
            await http.wait("job-1", lambda s: seen.append(s.progress), timeout_s=0.05)
    assert seen and set(seen) == {0.25}


async def test_patience_ends() -> None:
    async with client(lambda request: httpx.Response(503), patience_s=0.2) as http:
        with pytest.raises(RequestFailedError) as caught:
            await asyncio.wait_for(http.status("job-1"), HANG_S)
    assert caught.value.http_status == 503


def run(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, list(arguments), input=stdin)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_submit_and_wait(serve: Callable[[Handler], None], tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            body = request.read()
            sent.append(json.loads(body.split(b"\r\n\r\n")[1].split(b"\r\n")[0]))
            assert b'{"prompt": "a"}' in body
            return httpx.Response(202, json=status("queued", 0))
        return httpx.Response(200, json=status())

    serve(handler)
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n')
    arguments = ["submit", str(file), "--model", "m", "--n", "2", "--max-tokens", "8"]
    code, out, _ = run(*arguments, "--reward", '{"name": "length", "options": {"target": 3}}', "--wait")
    assert code == 0
    assert "job-1 succeeded: 4 of 4 samples, 20 tokens, mean reward 0.5, 2.0 s" in out
    assert sent[0]["kind"] == "rollout" and sent[0]["reward"]["options"] == {"target": 3}
    assert (sent[0]["n"], sent[0]["max_tokens"]) == (2, 8)
    code, out, _ = run("submit", "-", "--model", "m", "--json", stdin='{"prompt": "a"}\n')
    assert code == 0 and json.loads(out)["status"] == "queued"
    assert sent[1]["kind"] == "generate"


def test_the_only_model_is_the_default(serve: Callable[[Handler], None]) -> None:
    names = ["m"]

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            data = [{"id": name} for name in names] + [{"id": "lora", "parent": "m"}]
            return httpx.Response(200, json={"object": "list", "data": data})
        return httpx.Response(202, json=status("queued", 0))

    serve(handler)
    assert run("submit", "-", stdin='{"prompt": "a"}')[0] == 0
    names.append("m2")
    code, _, err = run("submit", "-", stdin='{"prompt": "a"}')
    assert code == 2 and "m, m2" in err
    assert run("models")[1].split() == ["m", "m2", "lora"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["submit", "/none.jsonl", "--model", "m"], 2, "/none.jsonl"),
        (["submit", "-", "--model", "m", "--kind", "train"], 2, "--kind train"),
        (["submit", "-", "--model", "m", "--reward", "{"], 2, "--reward"),
        (["job", "job-1"], 1, "no job 'job-1'"),
        (["results", "job-1"], 1, "no job 'job-1'"),
        (["chat", "hi", "--model", "m"], 1, "no job 'job-1'"),
    ],
)
def test_errors_have_a_code_and_no_traceback(
    serve: Callable[[Handler], None], arguments: list[str], code: int, says: str
) -> None:
    error = {"message": "no job 'job-1', or [its] time is over", "type": "x", "code": "job_not_found"}
    serve(lambda request: httpx.Response(404, json={"error": error}))
    got, out, err = run(*arguments, stdin="")
    assert (got, out) == (code, "")
    assert says in err and "Traceback" not in err


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.cli.client, "POLL_S", (0.01, 0.01))
    code, _, err = run("health", "--url", "http://127.0.0.1:9")
    assert code == 1 and "mlx_parallm_serve" in err


def test_a_job_without_success_exits_3(serve: Callable[[Handler], None]) -> None:
    serve(lambda request: httpx.Response(200, json=status("failed", 1, error="no worker [x]")))
    code, out, _ = run("job", "job-1")
    assert code == 3 and "no worker [x]" in out


def test_results_go_to_a_file(serve: Callable[[Handler], None], tmp_path: Path) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/jobs/job-1":
            return httpx.Response(200, json=status(done=2, total=2))
        return httpx.Response(200, text=line(0) + "\n" + line(1) + "\n")

    serve(handler)
    code, out, err = run("results", "job-1", "--out", str(tmp_path / "out.jsonl"))
    assert (code, out) == (0, "") and "2 trajectories" in err
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_a_conversation_keeps_its_history(serve: Callable[[Handler], None]) -> None:
    asked: list[int] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(len(json.loads(request.read())["messages"]))
        return httpx.Response(200, text='data: {"choices": [{"delta": {"content": "[yes]"}}]}\n\ndata: [DONE]\n\n')

    serve(handler)
    code, out, _ = run("chat", "--model", "m", "--system", "be brief", stdin="a\n\nb\n")
    assert code == 0 and asked == [2, 4]
    assert out.count("[yes]") == 2


@pytest.mark.parametrize("option", [("--class", "foo"), ("--rate", "often"), ("--name", "two words")])
def test_no_key_is_made_whose_line_a_server_would_refuse(option: tuple[str, str]) -> None:
    made = CliRunner().invoke(cli.app, ["key", "new", *option])
    assert (made.exit_code, made.stdout) == (2, "") and made.stderr.startswith("error: this key")


@pytest.mark.parametrize("text", [b"", b"\n", b"\xff\xfe\n", "schlüssel".encode()])
def test_what_cannot_be_a_key_gets_no_line(text: bytes) -> None:
    hashed = CliRunner().invoke(cli.app, ["key", "hash"], input=text)
    assert (hashed.exit_code, hashed.stdout) == (2, "")


REFUSED = {"error": {"message": "no such thing", "type": "x", "code": "not_found"}}


@pytest.mark.parametrize("command", [("results", "x"), ("files", "get", "x")])
def test_a_refused_request_leaves_an_older_file_alone(
    serve: Callable[[Handler], None], tmp_path: Path, command: tuple[str, ...]
) -> None:
    serve(lambda request: httpx.Response(404, json=REFUSED))
    (tmp_path / "old").write_text("kept")
    assert run(*command, "--out", str(tmp_path / "old"))[0] == 1
    assert (tmp_path / "old").read_text() == "kept"


def test_a_file_that_cannot_be_written_is_one_line(
    serve: Callable[[Handler], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/jobs/job-1":
            return httpx.Response(200, json=status(done=2, total=2))
        return httpx.Response(200, text=line(0) + "\n" + line(1) + "\n")

    serve(handler)
    code, out, err = run("results", "job-1", "--out", str(tmp_path / "none" / "x"))
    assert (code, out) == (2, "") and "No such file" in err
    assert not caplog.records, "asyncio found an answer that nobody had closed"


@pytest.mark.parametrize("command", ["job", "cancel", "results"])
def test_an_id_is_one_segment_of_a_path(serve: Callable[[Handler], None], command: str) -> None:
    asked: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path)
        return httpx.Response(404, json=REFUSED)

    serve(handler)
    assert run(command, "../adapters?x")[0] == 1
    assert asked[0].startswith(b"/v1/jobs/..%2Fadapters%3Fx")
    assert [run(command, name)[0] for name in ("", "..")] == [2, 2]


def test_health_is_told_when_it_is_bad_and_fails(serve: Callable[[Handler], None]) -> None:
    serve(lambda request: httpx.Response(503, json={"status": "overloaded", "reasons": ["no worker is there"]}))
    code, out, err = run("health")
    assert (code, err) == (1, "") and json.loads(out)["reasons"] == ["no worker is there"]


@pytest.mark.parametrize(("command", "status_code"), [("health", 200), ("health", 503), ("models", 404)])
def test_what_another_server_says_is_one_line(serve: Callable[[Handler], None], command: str, status_code: int) -> None:
    serve(lambda request: httpx.Response(status_code, text="<html>\n<p>" + "Hello " * 30 + "\n</html>\n"))
    code, out, err = run(command)
    assert (code, out) == (1, "") and err.startswith("error: ") and err.count("\n") == 1


def test_a_chat_as_json_is_the_server_s_whole_answer(serve: Callable[[Handler], None]) -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": "[yes]"}}], "usage": {"total_tokens": 3}}
    serve(lambda request: httpx.Response(200, json=answer))
    code, out, _ = run("chat", "hi", "--model", "m", "--json")
    assert code == 0 and json.loads(out) == answer


def test_an_address_without_a_scheme_is_http() -> None:
    assert InferenceClient("mac-1.local:8000").url == "http://mac-1.local:8000"


@pytest.mark.parametrize("key", ["a\nb", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(RequestFailedError, match="ASCII") as caught:
        InferenceClient("http://127.0.0.1:9", api_key=key)
    assert key not in caught.value.message


def test_what_a_model_thinks_goes_to_stderr(serve: Callable[[Handler], None]) -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "[hm]"}, {"content": "yes"}, {}]
    events = "".join(f"data: {json.dumps({'choices': [{'delta': each}]})}\n\n" for each in deltas)
    serve(lambda request: httpx.Response(200, text=events + "data: [DONE]\n\n"))
    code, out, err = run("chat", "hi", "--model", "m")
    assert (code, out, err) == (0, "yes\n", "[hm]\n")


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    serve: Callable[[Handler], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append([turn["content"] for turn in json.loads(request.read())["messages"]])
        if len(asked) == 1:
            raise KeyboardInterrupt
        if len(asked) == 2:
            return httpx.Response(400, json=REFUSED)
        return httpx.Response(200, text='data: {"choices": [{"delta": {"content": "yes"}}]}\n\ndata: [DONE]\n\n')

    serve(handler)
    monkeypatch.setattr(chat, "is_by_hand", lambda: True)
    code, out, err = run("chat", "--model", "m", stdin="a\nb\nc\nd\n")
    assert code == 0 and out.count("yes") == 2
    assert "interrupted" in err and "no such thing" in err
    assert asked == [["a"], ["b"], ["c"], ["c", "yes", "d"]], "what was never answered is forgotten"
    monkeypatch.setattr(chat, "is_by_hand", lambda: False)
    asked.clear()
    assert run("chat", "--model", "m", stdin="a\nb\n")[0] == 130, "a script is told"
