"""Owners of things, and their rights. The api identifies the asker (api/tenants.py); stores have the owner.

A job, file, batch, stream, dead letter, adapter or policy carries its owner from the write that makes it. "" is
nobody's in particular: what was there before the server had tenants, or what the operator put there for all. It is
everybody's to read and to use, and an admin's to change. A thing of another tenant is not there at all.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass

ADMINS = "(admins)"  # owns what an admin without a tenant makes, and what belongs to no tenant but may hold any's texts


@dataclass(frozen=True)
class Asker:
    """Who asks; `limited` to what its tenant owns and what is everybody's."""

    tenant: str = ""  # owns what the asker makes
    limited: bool = False

    @classmethod
    def working_for(cls, owner: str) -> "Asker":
        """A process that works on a thing of this owner, without a request of the owner."""
        return cls(owner, limited=owner not in ("", ADMINS))

    def sees(self, owner: str) -> bool:
        """True if the asker may read a thing of this owner."""
        return not self.limited or owner in ("", self.tenant)

    def owns(self, owner: str) -> bool:
        """True if the asker may list, change, cancel and delete a thing of this owner."""
        return not self.limited or owner == self.tenant

    @property
    def publishes_for(self) -> str:
        """Who owns an adapter that the asker makes: an admin's own are for all."""
        return "" if self.tenant == ADMINS else self.tenant


ANYBODY = Asker()
WhoAsks = Callable[[], Asker]


_working: ContextVar[str] = ContextVar("working", default="")


def anybody() -> Asker:
    """Who asks in a process that works for itself: it sees everything."""
    return ANYBODY


@contextlib.contextmanager
def working_for(owner: str) -> Iterator[None]:
    """While the block runs, `whoever_it_is_for` answers with this owner."""
    before = _working.set(owner)
    try:
        yield
    finally:
        _working.reset(before)


def whoever_it_is_for() -> Asker:
    """Who asks in a process that works for all tenants: the owner of its present work (`working_for`)."""
    return Asker.working_for(_working.get())
