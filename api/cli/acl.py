"""`mlx_parallm acl`: users for a Redis that others reach, too. Works without a server."""

import hashlib
import secrets
import sys
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import typer

RoleName = Literal["api", "worker", "runner", "trainer", "viewer"]
ROLES: tuple[RoleName, ...] = get_args(RoleName)

_DATA = (
    "-@all", "+@string", "+@hash", "+@list", "+@set", "+@sortedset", "+@stream", "+@keyspace", "+@transaction",
    "+@connection", "+@pubsub", "+evalsha", "+script|load", "+time", "+cluster|slots",
    "-@dangerous", "-@admin", "-scan", "-randomkey",
)  # fmt: skip
_LOOK = ("-@all", "+@read", "+@connection", "-@dangerous", "-@admin", "+info", "+cluster|slots")


@dataclass(frozen=True)
class Role:
    """Key patterns (with %R~ and %W~ for one direction), channels and commands of one kind of process."""

    keys: tuple[str, ...]
    channels: tuple[str, ...]
    commands: tuple[str, ...] = _DATA


_MODEL = ("~parallm:{*}:*", "~parallm:models")  # queues, sequences, logs, registry, totals of metrics
_ADAPTERS = ("~parallm:adapter:*", "~parallm:adapters")
_FRAMES = ("%R~parallm:api:{*}", "~parallm:api:{*}:frames")  # the process that ends a sequence notifies its reader
_TELL = ("&parallm:api:*", "&parallm:ctl:*")

ROLE: dict[RoleName, Role] = {
    "api": Role(("~parallm:*", "~arq:*"), ("&parallm:*", "&arq:*"), (*_DATA, "+info")),
    "worker": Role(
        (
            *_MODEL, *_ADAPTERS, *_FRAMES, "~parallm:tokenizer:*", "~parallm:pause", "~parallm:train*",
            "~parallm:answer:*", "~parallm-peers:*", "%R~parallm:kept:{*}:thing:*", "%R~parallm:job:{*}:images",
        ),
        (*_TELL, "&parallm:adapters:events", "&parallm:alerts"),
    ),
    "runner": Role(
        (
            *_MODEL, *_FRAMES, "~parallm:job:*", "~parallm:jobs*", "~parallm:file*", "~parallm:batch*",
            "~parallm:train*", "~parallm:score:*", "~parallm:answer:*", "%R~parallm:adapter:*", "%R~parallm:adapters",
            "%R~parallm:tokenizer:*", "~arq:*",
        ),
        (*_TELL, "&arq:*"),
        (*_DATA, "+info"),  # arq looks at it when it starts
    ),
    "trainer": Role(
        (
            *_MODEL, *_ADAPTERS, *_FRAMES, "%R~parallm:tokenizer:*", "~parallm:train*", "~parallm:score:*",
            "~parallm:answer:*", "~parallm:learner:*", "~parallm-ranks:*",
        ),
        (*_TELL, "&parallm:adapters:events", "&parallm:alerts"),
    ),
    "viewer": Role(("%R~parallm:*",), (), _LOOK),
}  # fmt: skip


def rules(role: RoleName) -> list[str]:
    """The rules of a role, as ACL SETUSER takes them, without a password."""
    access = ROLE[role]
    return ["resetkeys", *access.keys, "resetchannels", *access.channels, *access.commands]


def user_line(role: RoleName, password: str) -> str:
    """The aclfile's line of the user `parallm-<role>`; the password is in it as its SHA-256 alone."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    return " ".join([f"user parallm-{role} on #{digest}", *rules(role)])


def acl(
    host: Annotated[
        str, typer.Option(help="host of the Redis, for the URLs; several, separated by commas, form a cluster")
    ] = ("HOST:6379"),
) -> None:
    """Print an aclfile with one user per role and new passwords; each role's URL is printed to stderr.

    A server accepts only users in its aclfile, not even comments. All servers of a cluster get the same file.
    """
    scheme, database = ("rediss+cluster", "") if "," in host else ("rediss", "/0")
    for role in ROLES:
        password = secrets.token_urlsafe(32)
        print(f"{role}: {scheme}://parallm-{role}:{password}@{host}{database}", file=sys.stderr)
        print(user_line(role, password))
