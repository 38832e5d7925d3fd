"""API keys: who may ask, in which class, how much. Known by their SHA-256 alone, compared in constant time.

A key comes from `--api-key` (or PARALLM_API_KEY; several with commas between) or from a line of `--api-key-file`:

    <key or sha256:HEX> [name=alice] [class=interactive|batch] [rate=600/minute] [concurrent=32]
                        [tenant=acme | role=admin] [feedback=no] [learn=yes|user]

With feedback=no no answer to the key is kept for feedback. With learn=yes a judge model may read what the user writes
next, and what it finds becomes the answer's reward. With learn=user the key's users agree each for themselves: of a
request without the header `X-Parallm-Learn: yes` nothing is kept, and all others are as with learn=yes.
Keys of one tenant share what they make; an admin's key sees and does all. Where one key says either, each must.

Keys of ours are 256 random bits, so a plain hash is enough; a key that a person has thought up has to be long.
Invariant: no key stays in memory or in a message, a name or a part of the digest stands for it.

No FastAPI is imported here: `mlx_parallm_serve` checks the exposure of its host before it starts an api.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import structlog
from limits import RateLimitItem, parse

from api.callers.caller import ApiKey
from shared.errors import SetupError
from shared.process.api_settings import ApiSettings
from shared.sequences import SequenceClass

log = structlog.get_logger()

PREFIX = "plm-"
TINKER_PREFIX = "tml-"  # Tinker's SDK sends no key without it, so any key of ours may follow it
SHORTEST = 16  # characters of a plain key, below which we warn
_DIGEST = re.compile(r"sha256:[0-9a-fA-F]{64}")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_FIELDS = frozenset({"name", "class", "rate", "concurrent", "tenant", "role", "feedback", "learn"})


class KeyRing:
    """The keys of one server."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._keys = tuple(keys)
        for what in ("name", "digest"):
            if len({getattr(key, what) for key in keys}) < len(keys):
                raise SetupError(f"two API keys have one {what}")
        if any(key.apart for key in keys) and (bare := [key for key in keys if not key.apart]):
            raise SetupError(
                f"API key {bare[0].name!r} has neither tenant=NAME nor role=admin, and other keys have: say it of each"
            )

    @classmethod
    def plain(cls, settings: ApiSettings) -> "KeyRing":
        """The keys of `--api-key` alone, without those of the file."""
        given = settings.api_key.get_secret_value().split(",")
        return cls([_key(part, "--api-key") for part in given if part.strip()])

    @classmethod
    def of(cls, settings: ApiSettings) -> "KeyRing":
        """The keys that the settings name; SetupError says which line is wrong, without showing it."""
        found = list(cls.plain(settings)._keys)
        if settings.api_key_file is not None:
            found += list(_lines(settings.api_key_file))
            if not found:
                raise SetupError(f"--api-key-file {settings.api_key_file} has no key")
        return cls(found)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys)

    def find(self, presented: str) -> ApiKey | None:
        """The key that was presented, also after TINKER_PREFIX; takes as long for a wrong one as for a right one."""
        spellings = (presented, presented.removeprefix(TINKER_PREFIX))
        digests = [hashlib.sha256(each.encode()).digest() for each in spellings]
        found: ApiKey | None = None
        for key in self._keys:
            for digest in digests:
                if hmac.compare_digest(key.digest, digest):
                    found = key
        return found

    def hashed(self) -> str:
        """The keys as `--api-key` takes them, without the keys themselves; names and limits are left out."""
        right = {key: "role=admin" if key.admin else f"tenant={key.tenant}" * bool(key.tenant) for key in self._keys}
        return ",".join(f"sha256:{key.digest.hex()} {right[key]}".strip() for key in self._keys)


def new_key() -> str:
    """A fresh key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def line_of(key: str, **options: str) -> str:
    """The line of a key file for a key: its digest and the options that are not empty.

    SetupError when a server would not read it.
    """
    shown = [f"{name}={value}" for name, value in options.items() if value]
    line = " ".join([f"sha256:{hashlib.sha256(key.encode()).hexdigest()}", *shown])
    _key(line, "this key")
    return line


def rate_of(text: str, where: str) -> RateLimitItem:
    """`600/minute`, `10 per second`; SetupError when it is neither."""
    try:
        return parse(text)
    except ValueError:
        raise SetupError(f"{where}: {text!r} is no rate such as 600/minute") from None


def _lines(path: Path) -> Iterator[ApiKey]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--api-key-file {path} cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield _key(line, f"{path} line {number}")


def _key(line: str, where: str) -> ApiKey:
    secret, *fields = line.split()
    if _DIGEST.fullmatch(secret):
        digest = bytes.fromhex(secret.removeprefix("sha256:"))
    elif secret.startswith("sha256:"):
        raise SetupError(f"{where}: a digest is sha256: and 64 hexadecimal digits")
    else:
        if len(secret) < SHORTEST:
            log.warning("api.short_key", where=where, hint="mlx_parallm key new makes a good one")
        digest = hashlib.sha256(secret.encode()).digest()
    given = dict(field.partition("=")[::2] for field in fields)
    if len(given) < len(fields):
        raise SetupError(f"{where}: a field stands there twice")
    if unknown := given.keys() - _FIELDS:
        raise SetupError(f"{where}: unknown field {sorted(unknown)[0][:20]!r}")
    kind: SequenceClass = "batch" if given.get("class") == "batch" else "interactive"
    if given.get("class", kind) != kind:
        raise SetupError(f"{where}: class is one of {', '.join(get_args(SequenceClass))}")
    name = given.get("name", f"key-{digest.hex()[:8]}")
    if not _NAME.fullmatch(name):
        raise SetupError(f"{where}: a name is letters, digits and ._@-")
    concurrent = given.get("concurrent", "0")
    if not concurrent.isdecimal():
        raise SetupError(f"{where}: concurrent is a number")
    if "tenant" in given and not _NAME.fullmatch(given["tenant"]):
        raise SetupError(f"{where}: a tenant is letters, digits and ._@-")
    if given.get("role", "admin") != "admin":
        raise SetupError(f"{where}: the only role is admin")
    if {"tenant", "role"} <= given.keys():
        raise SetupError(f"{where}: an admin's key has no tenant: give the admin a second key for work of its own")
    if given.get("feedback", "no") not in ("no", "yes"):
        raise SetupError(f"{where}: feedback is yes or no")
    learn = given.get("learn", "no")
    if learn not in ("no", "yes", "user"):
        raise SetupError(f"{where}: learn is yes, no or user")
    if learn != "no" and given.get("feedback") == "no":
        raise SetupError(f"{where}: learn={learn} needs the answers that feedback=no does not store")
    rate = rate_of(given["rate"], where) if "rate" in given else None
    return ApiKey(
        name,
        digest,
        kind,
        rate,
        int(concurrent),
        given.get("tenant", ""),
        "role" in given,
        given.get("feedback", "yes") == "yes",
        learn != "no",
        learn == "user",
    )


def check_exposure(settings: ApiSettings) -> None:
    """SetupError when anybody on the network could ask."""
    if settings.uds or settings.insecure or _is_loopback(settings.host) or KeyRing.of(settings):
        return
    raise SetupError(
        f"--host {settings.host} without an API key lets anybody who reaches this machine in: set --api-key or "
        "--api-key-file (mlx_parallm key new makes a key), or say --insecure"
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
