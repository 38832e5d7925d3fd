"""Redis URLs: Sentinel's form, what is wrong with one, and that no password of one is shown."""

import pytest

from api.ops.ring_address import address_of
from shared.errors import SetupError
from shared.process.ring_query import find_redis
from shared.redis.connection.address import SentinelAddress, is_sentinel, shown
from shared.redis.connection.client import connect, require


def test_hosts_service_database_and_credentials_are_read() -> None:
    url = "redis+sentinel://me:p%40ss@s1:26380,s2,[::1]:26381/my%20ring/3?sentinel_password=a%26b&max_connections=7"
    address = SentinelAddress.parse(url)
    assert address.sentinels == (("s1", 26380), ("s2", 26379), ("::1", 26381))
    assert address.service == "my ring" and address.password == "a&b" and not address.tls
    assert address.data_url == "redis://me:p%40ss@sentinel/3?max_connections=7"


def test_without_a_database_it_is_the_first() -> None:
    assert SentinelAddress.parse("redis+sentinel://s/ring").data_url == "redis://sentinel/0"


def test_tls_is_for_sentinels_and_servers() -> None:
    address = SentinelAddress.parse("REDISS+SENTINEL://:pw@s/ring?ssl_ca_certs=/ca.pem")
    assert address.tls and address.data_url == "rediss://:pw@sentinel/0?ssl_ca_certs=%2Fca.pem"


async def test_options_reach_the_connections_of_both_kinds() -> None:
    client = connect(
        "rediss+sentinel://me:pw@s:1/ring/3?ssl_ca_certs=/ca.pem&sentinel_username=you&sentinel_password=x"
    )
    made = client.connection_pool.make_connection()
    assert (made.username, made.password, made.db, made.ca_certs) == ("me", "pw", 3, "/ca.pem")
    asked = client.connection_pool.sentinel_manager.sentinels[0].connection_pool.make_connection()
    assert (asked.host, asked.port, asked.username, asked.password, asked.ca_certs) == ("s", 1, "you", "x", "/ca.pem")
    assert asked.cert_reqs == made.cert_reqs != 0, "certificates are checked"
    await client.aclose()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+sentinel://s1,s2", "service is missing"),
        ("redis+sentinel://s1/ring/two", "'two' is no number"),
        ("redis+sentinel:///ring", "'' is no HOST:PORT"),
        ("redis+sentinel://s1,,s2/ring", "'' is no HOST:PORT"),
        ("redis+sentinel://s1:99999/ring", "'s1:99999' is no HOST:PORT"),
        ("redis+sentinel://s1:x/ring", "'s1:x' is no HOST:PORT"),
        ("redis+sentinel://s1/ring?sentinel_pasword=a", "unknown option sentinel_pasword"),
        ("redis+sentinel://s1/ring?max_connections=many", "max_connections"),
        ("redis-sentinel://s1/ring", "redis://"),
    ],
)
async def test_what_is_wrong_is_said_before_a_start(url: str, reason: str) -> None:
    with pytest.raises(SetupError, match=reason):
        await require(url)


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("redis+sentinel://me:s3cret@a:1,b:2/ring/0", "redis+sentinel://***@a:1,b:2/ring/0"),
        ("redis+sentinel://a/ring?sentinel_password=s3cret&db=1", "redis+sentinel://a/ring?sentinel_password=***&db=1"),
        ("redis://a?password=s3cret", "redis://a?password=***"),
        ("unix:///run/r.sock?db=1", "unix:///run/r.sock?db=1"),
        ("redis://a:6379/0", "redis://a:6379/0"),
        ("rediss+cluster://me:s3cret@a:1,b:2", "rediss+cluster://***@a:1,b:2"),
    ],
)
def test_a_url_is_shown_without_its_passwords(url: str, plain: str) -> None:
    assert shown(url) == plain


async def test_an_api_tells_of_its_sentinels_and_never_a_password() -> None:
    url = "redis+sentinel://me:s3cret@10.0.0.1:1,10.0.0.2:2/ring/1?sentinel_password=hush"
    told = address_of(url)
    assert (told.redis, told.username, told.needs_password) == (
        "redis+sentinel://10.0.0.1:1,10.0.0.2:2/ring/1",
        "me",
        True,
    )
    assert is_sentinel(url) and await find_redis(url) == url
    cluster = "redis+cluster://me:s3cret@10.0.0.1:1,10.0.0.2:2"
    assert address_of(cluster).redis == "redis+cluster://10.0.0.1:1,10.0.0.2:2" and await find_redis(cluster) == cluster
