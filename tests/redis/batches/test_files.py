"""Files over HTTP: which are taken, what they are called, and their shape for both protocols."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.redis.api_servers import Api
from tests.redis.batches.batch_requests import DAY, created, in_state, line, text, uploaded


async def test_only_a_file_that_was_uploaded_for_batches_is_an_input(server: Api) -> None:
    batch_id = await created(server, text(line("a")))
    await server.post(f"/v1/batches/{batch_id}/cancel", {})
    ended = await in_state(server, batch_id, "cancelled")
    others = [(await uploaded(server, b"{}\n", purpose)).json() for purpose in ("fine-tune", "user_data")]
    assert [each["purpose"] for each in others] == ["fine-tune", "user_data"]
    for file_id in (ended["error_file_id"], *(each["id"] for each in others)):
        refused = await server.post("/v1/batches", {**DAY, "input_file_id": file_id})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input_file_id")
    unknown = await server.post("/v1/batches", {**DAY, "input_file_id": "file-no"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "file_not_found")


async def test_an_upload_that_makes_no_sense_is_refused_by_the_field(server: Api) -> None:
    post = server.http.post
    ok = ("x.jsonl", b"{}\n")
    wrong: list[tuple[dict[str, Any], str | None]] = [
        ({"data": {"purpose": "batch"}, "files": {"file": ("x.jsonl", b"")}}, "file"),
        ({"data": {"purpose": "batch_output"}, "files": {"file": ok}}, "purpose"),
        ({"files": {"file": ok}}, "purpose"),
        ({"data": {"purpose": "batch", "colour": "red"}, "files": {"file": ok}}, "colour"),
        ({"data": {"purpose": "batch"}, "files": {"other": ok}}, "other"),
        ({"data": {"purpose": "batch", "file": "text"}, "files": {"x": ("", b"")}}, "x"),
        ({"data": {"purpose": "batch"}, "files": [("file", ok), ("file", ok)]}, None),
        (
            {"data": {"purpose": "batch", "expires_after[seconds]": "60"}, "files": {"file": ok}},
            "expires_after[anchor]",
        ),
        ({"json": {"purpose": "batch"}}, "file"),
        ({"content": b"nonsense", "headers": {"content-type": "multipart/form-data"}}, None),
        ({"content": b"nonsense", "headers": {"content-type": "multipart/form-data; boundary=b"}}, None),
    ]
    for request, param in wrong:
        answer = await post("/v1/files", **request)
        assert answer.status_code == 400, (request, answer.text)
        assert param is None or answer.json()["error"]["param"] == param, (request, answer.text)
    assert (await server.http.get("/v1/files")).json()["data"] == []


@pytest.mark.parametrize(
    ("given", "shown"),
    [("données ☃.jsonl", "données ☃.jsonl"), ("../../etc/passwd", "passwd"), ("a\u202eb.jsonl", "a?b.jsonl")],
)
async def test_a_file_keeps_its_name_for_people(server: Api, given: str, shown: str) -> None:
    answer = await server.http.post("/v1/files", data={"purpose": "batch"}, files={"file": (given, b"{}\n")})
    assert answer.json()["filename"] == shown
    assert f"<code>{shown}</code>" in (await server.http.get(f"/dashboard/files/{answer.json()['id']}")).text


async def test_a_file_may_come_without_a_name(server: Api) -> None:
    parts = (b'name="purpose"\r\n\r\nbatch', b'name="file"\r\n\r\n\xff{}\n')
    body = b"".join(b"--b\r\ncontent-disposition: form-data; " + part + b"\r\n" for part in parts) + b"--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    stored = (await server.http.post("/v1/files", content=body, headers=headers)).json()
    assert (stored["filename"], stored["bytes"]) == ("file.jsonl", 4)
    assert (await server.http.get(f"/v1/files/{stored['id']}/content")).content == b"\xff{}\n"


async def test_files_have_anthropic_s_shape_for_its_clients(server: Api) -> None:
    ours, theirs = (await uploaded(server, b"{}\n")).json()["id"], {"anthropic-version": "2023-06-01"}

    async def ask(method: str, path: str, **request: Any) -> Any:
        return await server.http.request(method, f"/v1/files{path}", headers=theirs, **request)

    picture = {"file": ("a/b.png", b"data", "image/png")}
    stored = (await ask("POST", "", files=picture, data={"expires_in_seconds": "3600"})).json()
    assert (stored["type"], stored["filename"], stored["mime_type"], stored["size_bytes"]) == (
        "file", "b.png", "image/png", 4,
    )  # fmt: skip
    lived = [datetime.fromisoformat(stored[name]) for name in ("created_at", "expires_at")]
    assert lived[1] - lived[0] == timedelta(hours=1)
    assert (await ask("GET", f"/{stored['id']}")).json() == stored
    first = (await ask("GET", "?limit=1")).json()
    second = (await ask("GET", f"?limit=1&page={first['next_page']}")).json()
    assert [each["id"] for each in first["data"] + second["data"]] == [stored["id"], ours]
    assert second["next_page"] is None
    assert (await ask("GET", f"?ids[]={ours}&ids[]=file-no&ids[]={ours}")).json()["data"] == second["data"]
    for method, path, request, status in (
        ("GET", "?limit=0", {}, 400),
        ("GET", "?limit=x", {}, 400),
        ("GET", "?page=file-no", {}, 400),
        ("GET", "?page=page_file-no", {}, 404),
        ("GET", "?ids[]=" + ",".join(map(str, range(101))), {}, 400),
        ("GET", "/file-no", {}, 404),
        ("POST", "", {"files": picture, "data": {"expires_in_seconds": "1"}}, 400),
        ("POST", "", {"files": picture, "data": {"expires_in_seconds": "-1"}}, 400),
        ("POST", "", {"files": picture, "data": {"purpose": "batch"}}, 400),
        ("POST", "", {"data": {"expires_in_seconds": "3600"}, "files": {"other": b""}}, 400),
        ("POST", "", {"json": {}}, 400),
    ):
        kind = {400: "invalid_request_error", 404: "not_found_error"}[status]
        refused = await ask(method, path, **request)
        assert (refused.status_code, refused.json()["error"]["type"]) == (status, kind), (method, path, refused.text)
    assert (await ask("DELETE", f"/{ours}")).json() == {"id": ours, "type": "file_deleted"}
    purposes = [each["purpose"] for each in (await server.http.get("/v1/files")).json()["data"]]
    assert purposes == ["user_data"]
