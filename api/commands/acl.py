"""`mlx_parallm acl`: users for a Redis that others reach, too. Works without a server."""

import secrets
import sys
from typing import Annotated

import typer

from shared.redis.acl import ROLES, user_line


def acl(host: Annotated[str, typer.Option(help="of the Redis, for the URLs")] = "HOST:6379") -> None:
    """Print an aclfile with one user a role, under fresh passwords; each role's URL goes to stderr.

    A server takes nothing but users in its aclfile, comments neither.
    """
    for role in ROLES:
        password = secrets.token_urlsafe(32)
        print(f"{role}: rediss://parallm-{role}:{password}@{host}/0", file=sys.stderr)
        print(user_line(role, password))
