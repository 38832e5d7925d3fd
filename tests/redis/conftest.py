"""A client on a Redis of this test process, an api and its worker, a certificate.

And a check: no test leaves a key without owner or end.
"""

import subprocess
from collections.abc import AsyncIterator, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import redis as sync_redis
from redis.asyncio import Redis

from api.serve.embedded_redis import EmbeddedRedis
from shared.redis import keys
from shared.redis.connection.address import is_cluster
from shared.redis.connection.client import connect
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import ScriptedWorker, working


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked with `cluster` runs on one server and on a cluster."""
    if metafunc.definition.get_closest_marker("cluster"):
        metafunc.parametrize("redis_url", ["server", "cluster"], indirect=True)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def worker(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[ScriptedWorker]:
    """Answers as the `script` of the test's file says."""
    async with working(redis_url, request.module.script) as playing:
        yield playing


@pytest.fixture
async def server(redis_url: str, worker: ScriptedWorker) -> AsyncIterator[Api]:
    """An api process in the ring of `worker`."""
    async with api(redis_url) as serving:
        yield serving


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For localhost, with key.pem beside it."""
    folder = tmp_path_factory.mktemp("tls")
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(["openssl", "req", "-x509", *kind, *files, *name], check=True, capture_output=True)
    return folder / "cert.pem"


@pytest.fixture(autouse=True)
def no_leaked_keys(redis_url: str, redis_server: EmbeddedRedis, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if is_cluster(redis_url):
        found = {key.decode(): ttl for key, ttl in request.getfixturevalue("whole_cluster").all_keys().items()}
    else:
        with sync_redis.Redis.from_url(redis_server.url) as client:
            found = {key.decode(): client.ttl(key) for key in client.scan_iter(count=1000)}
    undocumented = [key for key in found if not any(fnmatchcase(key, kind.pattern) for kind in keys.DOCUMENTED)]
    immortal = [key for key, ttl in found.items() if ttl == -1 and not key.startswith("arq:")]
    assert undocumented == [], "keys that shared/redis/keys.py does not know"
    assert immortal == [], "keys without a time to live (arq's queue lives by arq's own rules)"


@pytest.fixture(autouse=True)
def one_loop_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Api and worker share the test's event loop, so its lag says nothing of the api: only long ones count."""
    monkeypatch.setattr("api.load.LAG_LIMIT_S", 10.0)
    monkeypatch.setattr("api.load.ALARM_S", 10.0)
