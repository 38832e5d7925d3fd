"""Keys, exposure, origins, the shape of bodies: what is decided before a route is asked."""

import contextlib
import hashlib
import random
import socket
import time
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from api.app import create_app, guard
from api.http import errors
from api.http.api_keys import KeyRing, check_exposure, line_of, new_key
from api.http.auth import OwnOrigin
from api.http.limits import MAX_JSON_DEPTH, check_shape
from api.load import ProcessLoad
from shared.errors import InvalidRequestError, SetupError
from shared.owners import ADMINS, Asker
from shared.process.api_settings import ApiSettings
from shared.telemetry.metrics import Tally


def settings(**given: object) -> ApiSettings:
    return ApiSettings.model_validate({"redis": "redis://127.0.0.1:1", **given})


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


# -- keys


def test_keys_come_from_the_flag_and_from_a_file_plain_or_hashed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        f"# people\n{line_of('third-key-is-long', name='carol', **{'class': 'batch', 'rate': '5/minute'})}\n"
        "\nfourth-key-is-long concurrent=3\n"
    )
    keys = KeyRing.of(settings(api_key=f"first-key-is-long, {digest('second-key-is-long')}", api_key_file=file))
    assert len(keys) == 4
    for key in ("first-key-is-long", "second-key-is-long", "fourth-key-is-long"):
        found = keys.find(key)
        assert found is not None and found.sequence_class == "interactive"
    carol = keys.find("third-key-is-long")
    assert carol is not None
    assert (carol.name, carol.sequence_class, str(carol.rate), carol.concurrent) == (
        "carol",
        "batch",
        "5 per 1 minute",
        0,
    )
    fourth = keys.find("fourth-key-is-long")
    assert fourth is not None and fourth.concurrent == 3
    for wrong in ("", "first-key-is-lon", "first-key-is-long ", digest("first-key-is-long")):
        assert keys.find(wrong) is None, "a digest is not a key"


def test_nothing_that_shows_a_key_is_kept() -> None:
    key = new_key()
    keys = KeyRing.of(settings(api_key=key))
    assert key not in repr(vars(keys)) and key not in keys.hashed()
    assert KeyRing.of(settings(api_key=keys.hashed())).find(key)
    assert key not in settings(api_key=key).resolved()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("sha256:12", "64 hexadecimal"),
        ("a-secret-of-some-length colour=red", "unknown field 'colour'"),
        ("a-secret-of-some-length class=urgent", "interactive, batch"),
        ("a-secret-of-some-length rate=often", "no rate"),
        ("a-secret-of-some-length concurrent=many", "a number"),
        ("a-secret-of-some-length name=a/b", "letters"),
        ("a-secret-of-some-length tenant=a/b", "a tenant is letters"),
        ("a-secret-of-some-length tenant=", "a tenant is letters"),
        ("a-secret-of-some-length role=god", "the only role is admin"),
        ("a-secret-of-some-length tenant=a role=admin", "no tenant"),
        ("a-secret-of-some-length tenant=a tenant=b", "twice"),
        ("", "no key"),
        ("a-secret-of-some-length\na-secret-of-some-length", "one "),
    ],
)
def test_a_wrong_line_is_named_and_its_key_is_not_shown(line: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(line)
    with pytest.raises(SetupError, match=reason) as refused:
        KeyRing.of(settings(api_key_file=file))
    assert "a-secret" not in str(refused.value)


def test_a_line_says_the_tenant_and_who_sees_all(tmp_path: Path) -> None:
    alice, root, ops = "alice-has-a-long-key", "root-has-a-long-key", "ops-has-a-long-key"
    file = tmp_path / "keys"
    file.write_text("\n".join([line_of(alice, tenant="acme"), line_of(ops, role="admin", **{"class": "batch"})]))
    keys = KeyRing.of(settings(api_key=f"{root} role=admin", api_key_file=file))
    found = {name: keys.find(name) for name in (alice, root, ops)}
    assert {name: key and key.asker for name, key in found.items()} == {
        alice: Asker("acme", limited=True),
        root: Asker(ADMINS),
        ops: Asker(ADMINS),
    }
    assert found[ops] and found[ops].sequence_class == "batch", "an admin's key has a queue, too"
    again = KeyRing.of(settings(api_key=keys.hashed()))
    assert [key.asker for key in again] == [key.asker for key in keys], "children know whose a key is"


@pytest.mark.parametrize("other", ["tenant=acme", "role=admin"])
def test_where_one_key_has_a_tenant_each_says_its_own(other: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"a-secret-of-some-length name=alice {other}\nanother-secret-of-some-length name=bob\n")
    with pytest.raises(SetupError, match="'bob' has neither tenant"):
        KeyRing.of(settings(api_key_file=file))
    file.write_text("a-secret-of-some-length name=alice\nanother-secret-of-some-length\n")
    assert not any(key.asker.limited for key in KeyRing.of(settings(api_key_file=file)))


def test_a_key_file_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot be read"):
        KeyRing.of(settings(api_key_file=tmp_path / "none"))


# -- exposure


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_alone_needs_no_key(host: str) -> None:
    check_exposure(settings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_beyond_this_machine_a_key_or_insecure_is_asked_for(host: str) -> None:
    with pytest.raises(SetupError, match="--insecure"):
        check_exposure(settings(host=host))
    check_exposure(settings(host=host, insecure=True))
    check_exposure(settings(host=host, api_key=SecretStr("a-key-that-is-long-enough")))


# -- origins


async def send(app: FastAPI, method: str, path: str, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here:8000") as http:
        return await http.request(method, path, headers=headers)


def page(*allowed: str) -> FastAPI:
    app = FastAPI()
    errors.install(app)

    @app.post("/do")
    async def do() -> str:
        return "done"

    app.add_middleware(OwnOrigin, allowed)
    return app


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://here:8000", 200), ("https://friend.example", 200), ("https://evil.example", 403), ("null", 403)],
)
async def test_pages_of_other_sites_cannot_act_where_no_key_is_wanted(origin: str, status: int) -> None:
    response = await send(page("https://friend.example"), "POST", "/do", origin=origin)
    assert response.status_code == status
    assert (await send(page(), "POST", "/do")).status_code == 200, "programs send no origin"


async def test_cors_is_off_unless_origins_are_named() -> None:
    asking = {"origin": "https://friend.example", "access-control-request-method": "POST"}
    off = await send(create_app(settings(allowed_hosts=["here"])), "OPTIONS", "/v1/completions", **asking)
    assert off.status_code == 405
    assert "access-control-allow-origin" not in off.headers
    key = "a-key-that-is-long-enough"
    on = create_app(settings(cors_origins=["https://friend.example"], api_key=key))
    allowed = await send(on, "OPTIONS", "/v1/completions", **asking)
    assert allowed.headers["access-control-allow-origin"] == "https://friend.example"
    refused = await send(on, "OPTIONS", "/v1/completions", **{**asking, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in refused.headers


# -- the shape of bodies


def nested(depth: int) -> bytes:
    return b'{"a":' * (depth // 2) + b"[" * (depth - depth // 2) + b"]" * (depth - depth // 2) + b"}" * (depth // 2)


def test_json_is_bounded_in_depth_and_in_values() -> None:
    check_shape(nested(MAX_JSON_DEPTH), 100)
    check_shape(b"[" + b",".join([b"[[1],[2]]"] * 30) + b"]", 200)
    check_shape(b'{"prompt": "' + b'[{,\\"' * 500 + b'"}', 10)
    with pytest.raises(InvalidRequestError, match="deeper"):
        check_shape(nested(MAX_JSON_DEPTH + 1), 100)
    with pytest.raises(InvalidRequestError, match="100 values"):
        check_shape(b"[" + b"1," * 100 + b"1]", 100)


@pytest.mark.parametrize(
    "body",
    [b"[" * 1_000_000, b'"' + b'\\"' * 500_000, b'"' * 1_000_001, b"[]" * 500_000, b'{"":' * 250_000, b"[{" * 500_000],
)
def test_looking_at_a_hostile_body_takes_no_longer_than_reading_it(body: bytes) -> None:
    began = time.process_time()
    with contextlib.suppress(InvalidRequestError):
        check_shape(body, 200_000)
    assert time.process_time() - began < 2, "it is not linear any more"


def test_whatever_bytes_come_the_shape_is_decided() -> None:
    draw = random.Random(1)
    for _ in range(500):
        body = bytes(draw.choice(b'[]{}",\\a1') for _ in range(draw.randrange(400)))
        try:
            check_shape(body, 20)
        except InvalidRequestError:
            continue


# -- pace


def test_retry_after_follows_the_pace_at_which_requests_end() -> None:
    load = ProcessLoad(4)
    assert load.retry_after_s(5) == 5
    for _ in range(50):
        with load.one("k"):
            assert load.utilization == 0.25
    assert load.retry_after_s(10) == 1
    assert load.retry_after_s(10_000) == 30
    assert (load.under_way, len(load.by_key)) == (0, 0)


def test_a_stop_of_the_event_loop_is_remembered_and_counted() -> None:
    tally = Tally()
    load = ProcessLoad(4, tally)
    load.looked(0.001)
    assert not load.stood_still
    load.looked(1.5)
    load.looked(0.0)
    assert load.stood_still
    assert load.longest_stop_s == 1.5
    assert not load.lags, "nobody waits here: the machine is busy with something else"
    with contextlib.ExitStack() as under_way:
        for _ in range(9):
            under_way.enter_context(load.one("k"))
        assert load.lags
    assert not load.lags
    assert 0.5 < load.lag_s < 1.5, "an old lag fades"
    counted = tally.fields()
    assert counted["mlx_parallm_api_loop_lag_seconds|2.5"] == 1
    assert counted["mlx_parallm_api_loop_lag_seconds|0.005"] == 2


# -- hosts


def guarded(**given: object) -> FastAPI:
    app = FastAPI()
    errors.install(app)

    @app.get("/ask")
    async def ask() -> str:
        return "answer"

    guard(app, settings(**given))
    return app


async def asked(app: FastAPI, host: str, method: str = "GET", **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as http:
        return await http.request(method, "/ask", headers={"host": host, **headers})


OURS = ["127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "localhost:8000", "LOCALHOST.", "a.localhost", "192.168.1.2:80",
        socket.gethostname(), "host.docker.internal:8000"]  # fmt: skip


@pytest.mark.parametrize("host", OURS)
async def test_addresses_and_names_of_this_machine_are_ours(host: str) -> None:
    assert (await asked(guarded(), host)).status_code == 200


THEIRS = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "x" * 5000]


@pytest.mark.parametrize("host", THEIRS)
async def test_a_page_cannot_call_under_a_name_of_its_own(host: str) -> None:
    """As after its name was made to point here: to its browser the origin is its own."""
    answer = await asked(guarded(), host, origin=f"http://{host}")
    assert answer.status_code == 403
    assert "--allowed-hosts" in answer.json()["error"]["message"] and len(answer.text) < 1000


async def test_the_host_is_looked_at_before_cors() -> None:
    app = guarded(cors_origins=["*"])
    asking = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    assert (await asked(app, "evil.example", "OPTIONS", **asking)).status_code == 403
    assert (await asked(app, "localhost", "OPTIONS", **asking)).status_code == 200


async def test_names_can_be_allowed_and_a_server_with_keys_takes_any() -> None:
    named = guarded(allowed_hosts=["App.example"])
    assert [(await asked(named, host)).status_code for host in ("app.example:443", "b.example", "localhost")] == [
        200, 403, 200,
    ]  # fmt: skip
    assert (await asked(guarded(allowed_hosts=["*"]), "b.example")).status_code == 200
    key = "a-key-that-is-long-enough"
    with_key = {"authorization": f"Bearer {key}"}
    assert (await asked(guarded(api_key=SecretStr(key), host="0.0.0.0"), "b.example", **with_key)).status_code == 200
    strict = guarded(api_key=SecretStr(key), allowed_hosts=["app.example"])
    assert (await asked(strict, "b.example", **with_key)).status_code == 403
