"""How Tinker's things are called, and whose they are.

Session S; its n-th learner S:train:n, which is also its training run; its n-th sampler S:sample:n. The SDK derives
these names, too. A request of a learner is L:k, with k its number; a sample is X:sample:k.

Invariant: a learner, session, sampler or sample is found under its keeper alone; to others it is not there.
"""

import hashlib
import re
from typing import NamedTuple

from api.callers.caller import asker, key_name
from api.ring.ring import Ring
from shared.errors import InvalidRequestError, NotFoundError
from shared.learners import LearnerSpec, SaveKind
from shared.redis import keys
from shared.redis.training.tinker_store import TinkerSession

SEGMENTS: dict[SaveKind, str] = {"state": "weights", "sampler": "sampler_weights", "external": "external_weights"}
KINDS: dict[str, SaveKind] = {segment: kind for kind, segment in SEGMENTS.items()}
INFLIGHT = ":1"  # after the id of a future whose sampler draws from the latest version
ID = r"^[A-Za-z0-9:_-]{1,128}$"
SAVE_NAME = r"^[A-Za-z0-9._-]{1,128}$"
_PATH = re.compile(
    r"tinker://([A-Za-z0-9:_-]{1,128})/(weights|sampler_weights|external_weights)/([A-Za-z0-9._-]{1,128})"
)


class SavePath(NamedTuple):
    """tinker://LEARNER/weights/NAME, or with sampler_weights or external_weights."""

    learner: str
    kind: SaveKind
    name: str

    @classmethod
    def parse(cls, path: str, param: str = "path") -> "SavePath":
        """InvalidRequestError when it is none."""
        found = _PATH.fullmatch(path)
        if found is None:
            raise InvalidRequestError(f"{path[:80]!r} is no path such as tinker://RUN/weights/NAME", param=param)
        return cls(found[1], KINDS[found[2]], found[3])

    def __str__(self) -> str:
        return f"tinker://{self.learner}/{SEGMENTS[self.kind]}/{self.name}"


def keeper() -> str:
    """Owner under whom the caller's sessions, samplers and samples are stored."""
    return keys.keeper(f"tinker of {asker().tenant or key_name()}")


def learner_of(session: str, number: int) -> str:
    """Id of the session's n-th learner."""
    return f"{session}:train:{number}"


def sampler_of(session: str, number: int) -> str:
    """Id of the session's n-th sampler."""
    return f"{session}:sample:{number}"


def adapter_of(learner: str) -> str:
    """The adapter that its weights are published as."""
    return f"run-{hashlib.sha256(learner.encode()).hexdigest()[:24]}"


async def session_named(ring: Ring, id: str) -> TinkerSession:
    """NotFoundError unless it is the asker's."""
    found = await ring.tinker.find(keeper(), TinkerSession, id)
    if found is None:
        raise NotFoundError("there is no such session", param="session_id")
    return found


async def spec_named(ring: Ring, learner: str) -> LearnerSpec:
    """NotFoundError unless the learner is the asker's."""
    if not re.fullmatch(ID, learner):
        raise InvalidRequestError("this is no id of a model", param="model_id")
    spec = await ring.learners.spec(learner)
    if spec.keeper != keeper():
        raise NotFoundError("there is no such learner, or its time to live is over")
    return spec
