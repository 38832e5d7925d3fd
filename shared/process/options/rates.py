"""How many requests in which time, as `--rate-limit` has it."""

from typing import Annotated

from pydantic import AfterValidator


def _checked(rate: str) -> str:
    from limits import parse  # here, since most processes ask for none

    try:
        parse(rate or "1/second")
    except ValueError:
        raise ValueError(f"{rate!r} is no rate such as 600/minute") from None
    return rate


Rate = Annotated[str, AfterValidator(_checked)]  # "": no bound
