"""Other rings that an api process serves models of, beside its own: `--ring NAME=URL`."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import AfterValidator, Field, PlainSerializer

from shared.redis.connection.address import SCHEMES, shown

HOME = "home"  # what an api process calls the ring of its own Redis
_BEGINS = re.compile(r"[^=:/]*=[a-z+]+://")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


def _checked(given: list[str]) -> list[str]:
    names = [name for name, _ in named_urls(given)]
    for each, (name, url) in zip(given, named_urls(given), strict=True):
        if not _NAME.fullmatch(name) or url.partition("://")[0] not in SCHEMES:
            raise ValueError(f"{shown(each)!r} is not NAME=URL, such as east=redis://east.local:6379")
        if name == HOME or names.count(name) > 1:
            raise ValueError(f"{name!r} names a ring twice; {HOME!r} is the one of --redis")
    return given


def _whole(given: list[str]) -> list[str]:
    """The command line parts values at commas, and a URL of several servers has some."""
    whole: list[str] = []
    for each in given:
        if whole and "+" in whole[-1].partition("://")[0] and not _BEGINS.match(each):
            whole[-1] += f",{each}"
        else:
            whole.append(each)
    return whole


def named_urls(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name and Redis URL of each ring."""
    for each in given:
        name, _, url = each.partition("=")
        yield name.strip(), url.strip()


def _shown(given: list[str]) -> list[str]:
    return [f"{name}={shown(url)}" for name, url in named_urls(given)]


OtherRings = Annotated[
    list[str],
    AfterValidator(_whole),
    AfterValidator(_checked),
    PlainSerializer(_shown, return_type=list[str], when_used="json"),
    Field(
        description="NAME=URL of another ring's Redis, several times: its models are served here, too; keys, rates and "
        "bounds are those of the ring of --redis"
    ),
]
