import httpx
import pytest

from api.ops.ring_address import address_of
from shared.errors import ServiceUnavailableError, SetupError
from shared.process.process_settings import JoinSettings
from shared.process.ring_query import api_url, find_redis
from shared.process.serve_settings import ServeSettings
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from trainer.settings import TrainSettings


def api_over(redis: str, status: int = 200) -> httpx.MockTransport:
    """An api whose Redis has this URL; what it answers is what the real endpoint makes of it."""

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/ring"
        if status == 401 and request.headers.get("authorization") == "Bearer right":
            return httpx.Response(200, json=address_of(redis).model_dump())
        return httpx.Response(status, json=address_of(redis).model_dump() if status == 200 else {})

    return httpx.MockTransport(answer)


@pytest.mark.parametrize("url", ["redis://h:1", "rediss://:secret@h:1/2", "unix:///run/redis.sock"])
async def test_a_redis_url_is_taken_as_it_is(url: str) -> None:
    assert await find_redis(url) == url


async def test_an_api_tells_where_its_redis_is() -> None:
    assert await find_redis("node1:8000", transport=api_over("redis://10.0.0.5:6379/0")) == "redis://10.0.0.5:6379/0"
    local = api_over("redis://127.0.0.1:7000/0")
    assert await find_redis("http://localhost:8000/v1", transport=local) == "redis://127.0.0.1:7000/0"


async def test_a_redis_that_its_machine_keeps_to_itself_is_refused_from_elsewhere() -> None:
    for redis in ("redis://127.0.0.1:7000/0", "redis://localhost:7000", "unix:///tmp/redis.sock"):
        with pytest.raises(SetupError, match="its own machine"):
            await find_redis("node1:8000", transport=api_over(redis))


async def test_an_api_never_tells_a_password() -> None:
    url = "rediss://trainer:s3cret@10.0.0.5:6379/1?ssl_cert_reqs=none"
    told = address_of(url)
    assert "s3cret" not in told.model_dump_json() and told.redis == "rediss://10.0.0.5:6379/1"
    with pytest.raises(SetupError, match="PARALLM_REDIS_PASSWORD"):
        await find_redis("node1:8000", transport=api_over(url))
    found = await find_redis("node1:8000", password="p@ss/word", transport=api_over(url))
    assert found == "rediss://trainer:p%40ss%2Fword@10.0.0.5:6379/1"


async def test_a_server_with_keys_wants_one() -> None:
    guarded = api_over("redis://10.0.0.5:6379", 401)
    with pytest.raises(SetupError, match="PARALLM_CONNECT_KEY"):
        await find_redis("node1:8000", transport=guarded)
    assert await find_redis("node1:8000", api_key="right", transport=guarded) == "redis://10.0.0.5:6379"
    with pytest.raises(SetupError, match="wants an admin's key"):
        await find_redis("node1:8000", api_key="a tenant's", transport=api_over("redis://10.0.0.5:6379", 403))


async def test_something_else_at_that_address_is_said_so() -> None:
    with pytest.raises(SetupError, match="no api of ours"):
        await find_redis("node1:8000", transport=api_over("redis://x", 404))
    for target in ("ftp://x", "http://", "", "host:notaport", "host:0"):
        with pytest.raises(SetupError, match="neither"):
            api_url(target)


@pytest.mark.parametrize("kind", [ServeSettings, WorkerSettings, TrainSettings])
async def test_every_process_that_may_join_a_ring_finds_it_alike(kind: type[JoinSettings]) -> None:
    both = load(kind, ["--redis", "redis://a", "--connect-to", "node1:8000"])
    with pytest.raises(SetupError, match="give one of them"):
        await both.join()
    found = load(kind, ["--connect-to", "redis://a:1", "--connect-key", "k", "--redis-password", "p"])
    await found.join()
    assert (found.redis, found.connect_to) == ("redis://a:1", "")
    assert not found.connect_key.get_secret_value() and not found.redis_password.get_secret_value()
    alone = load(kind, [])
    await alone.join()
    assert alone.redis == ""


async def test_an_api_that_may_answer_later_is_another_matter_than_a_wrong_one() -> None:
    with pytest.raises(ServiceUnavailableError, match="no api answers at http"):
        await find_redis("127.0.0.1:9")
    with pytest.raises(ServiceUnavailableError, match="503"):
        await find_redis("node1:8000", transport=api_over("redis://x", 503))


def test_the_trainer_takes_its_key_under_the_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLM_API_KEY", "secret")
    assert load(TrainSettings, []).connect_key.get_secret_value() == "secret"
    assert load(ServeSettings, []).connect_key.get_secret_value() == ""
