"""Redis URLs: what they name, and what of them may be shown. No connection is made here.

Besides redis-py's redis://, rediss:// and unix:// there is Sentinel's form, which others (docket, Prefect) spell alike:

    redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db][?options]

and rediss+sentinel:// for TLS to both kinds of server. User and password open the data servers;
`sentinel_username` and `sentinel_password` among the options open the Sentinels. The other options are redis-py's and
go to the data servers, those that begin with `ssl_` to both.

A Redis Cluster is named by some of its servers, which tell of the others:

    redis+cluster://[user:password@]host[:port][,host[:port]...][?options]

and rediss+cluster:// for TLS. It has one database.
"""

import re
import socket
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlencode

from redis.asyncio import Redis

SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
CLUSTER_SCHEMES = ("redis+cluster", "rediss+cluster")
SCHEMES = ("redis", "rediss", "unix", *SENTINEL_SCHEMES, *CLUSTER_SCHEMES)
SENTINEL_PORT = 26379
CLUSTER_PORT = 6379

_MEMBER = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:,/\s]+)(?::(?P<port>\d{1,5}))?")
_SECRET_OPTION = re.compile(r"(?<=[?&])((?:sentinel_)?password)=[^&]*")


@dataclass(frozen=True)
class RedisUrl:
    """A Redis URL taken apart, nothing decoded. `hosts` may be several, with commas between."""

    scheme: str
    username: str
    password: str
    hosts: str
    path: str  # from the slash on
    query: str

    @classmethod
    def of(cls, url: str) -> "RedisUrl":
        """Parse any URL; missing parts are ""."""
        scheme, _, rest = url.partition("://")
        rest, _, query = rest.partition("?")
        place, slash, path = rest.partition("/")
        credentials, _, hosts = place.rpartition("@")
        username, _, password = credentials.partition(":")
        return cls(scheme.lower(), username, password, hosts, slash + path, query)


@dataclass(frozen=True)
class SentinelAddress:
    """Addresses of the Sentinels, name of the service, and credentials of both kinds of server."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    tls: bool
    data_url: str  # redis:// or rediss:// with everything but the host, for redis-py's own parser
    username: str = ""  # at the Sentinels
    password: str = ""

    @property
    def shown(self) -> str:
        """Addresses of the Sentinels for log lines and errors, as `host:port, ...`."""
        return ", ".join(f"{host}:{port}" for host, port in self.sentinels)

    @classmethod
    def parse(cls, url: str) -> "SentinelAddress":
        """Parse the URL; ValueError states what is wrong."""
        parts = RedisUrl.of(url)
        service, _, db = parts.path.strip("/").partition("/")
        if not service:
            raise ValueError(f"the Sentinels' service is missing: {parts.scheme}://HOST:{SENTINEL_PORT}/SERVICE")
        if db and not db.isdigit():
            raise ValueError(f"{db!r} is no number of a database: {parts.scheme}://HOST:{SENTINEL_PORT}/SERVICE/0")
        options = parse_qsl(parts.query, keep_blank_values=True)
        for_data = urlencode([(name, value) for name, value in options if not name.startswith("sentinel_")])
        for_sentinels = {name: value for name, value in options if name.startswith("sentinel_")}
        username, password = for_sentinels.pop("sentinel_username", ""), for_sentinels.pop("sentinel_password", "")
        if for_sentinels:
            raise ValueError(f"unknown option {min(for_sentinels)}; there are sentinel_username and sentinel_password")
        tls = parts.scheme == "rediss+sentinel"
        credentials = f"{parts.username}:{parts.password}@" if parts.username or parts.password else ""
        data_url = f"{'rediss' if tls else 'redis'}://{credentials}sentinel/{db or 0}" + (for_data and f"?{for_data}")
        return cls(
            _members(parts.hosts, SENTINEL_PORT, "a Sentinel"), unquote(service), tls, data_url, username, password
        )


@dataclass(frozen=True)
class ClusterAddress:
    """Some servers of a cluster, and how to speak to all of them."""

    members: tuple[tuple[str, int], ...]
    tls: bool
    data_url: str  # redis:// or rediss:// with everything but the host, for redis-py's own parser

    @classmethod
    def parse(cls, url: str) -> "ClusterAddress":
        """Parse the URL; ValueError states what is wrong."""
        parts = RedisUrl.of(url)
        if parts.path.strip("/") not in ("", "0"):
            raise ValueError(f"a cluster has one database, 0, and not {parts.path.strip('/')!r}")
        members = _members(parts.hosts, CLUSTER_PORT, "a server of the cluster")
        tls = parts.scheme == "rediss+cluster"
        credentials = f"{parts.username}:{parts.password}@" if parts.username or parts.password else ""
        data_url = f"{'rediss' if tls else 'redis'}://{credentials}cluster/0" + (parts.query and f"?{parts.query}")
        return cls(members, tls, data_url)


def is_cluster(url: str) -> bool:
    """True if the URL's scheme is that of a Redis Cluster."""
    return RedisUrl.of(url).scheme in CLUSTER_SCHEMES


def is_sentinel(url: str) -> bool:
    """True if the URL's scheme is that of a service found through Sentinels."""
    return RedisUrl.of(url).scheme in SENTINEL_SCHEMES


def shown(url: str) -> str:
    """A Redis URL without its passwords."""
    scheme, separator, rest = url.partition("://")
    place, question, options = rest.partition("?")
    credentials, at, host = place.rpartition("@")
    options = _SECRET_OPTION.sub(r"\1=***", f"{question}{options}")
    return f"{scheme}{separator}{'***@' if at and credentials else ''}{host}{options}"


def _members(hosts: str, port: int, kind: str) -> tuple[tuple[str, int], ...]:
    members: list[tuple[str, int]] = []
    for each in hosts.split(","):
        place = _MEMBER.fullmatch(each.strip())
        if place is None or int(place["port"] or 1) not in range(1, 65536):
            raise ValueError(f"{each!r} is no HOST:PORT of {kind}")
        members.append((place["host"].strip("[]"), int(place["port"] or port)))
    return tuple(members)


def own_address(redis: str, given: str = "") -> str:
    """Address at which others reach this machine: the given one, else the one it uses towards Redis."""
    if given:
        return given
    host, port = _redis_at(redis)
    if not host:
        return "127.0.0.1"
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _redis_at(url: str) -> tuple[str, int]:
    """Where Redis, or the first of its Sentinels or servers, is; "": on this machine."""
    if is_cluster(url):
        return ClusterAddress.parse(url).members[0]
    if is_sentinel(url):
        return SentinelAddress.parse(url).sentinels[0]
    kwargs = Redis.from_url(url).connection_pool.connection_kwargs
    return str(kwargs.get("host", "")), int(kwargs.get("port", 6379))
