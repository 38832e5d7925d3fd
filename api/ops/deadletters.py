"""GET /v1/deadletters: sequences that were given up, and why; requeue runs one again, once; DELETE drops it."""

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Path, Query
from pydantic import BaseModel, Field

from api.callers.caller import asker
from api.http.errors import error_responses
from api.ring.ring import Ring, ring_of
from shared.redis.queue.dead_letters import DeadLetter, unknown_letter

router = APIRouter(prefix="/v1/deadletters", tags=["operations"])
TheRing = Annotated[Ring, Depends(ring_of)]
LetterId = Annotated[str, Path(description="`<model>:<entry>`, as the list gives it")]


class Letter(BaseModel):
    """A sequence that was given up, and why."""

    id: str
    object: Literal["deadletter"] = "deadletter"
    model: str
    sequence: str = Field(description="id of the sequence or message that was given up")
    reason: str
    worker: str = Field(description="who gave it up")
    attempt: int = Field(description="how often it had been claimed")
    job: str = Field(description='the job that it belonged to; "": none')
    stream: str = Field(description="the Redis stream that it stood in")
    died_ms: int = Field(description="Unix time")
    requeueable: bool
    unreadable: str = Field(description="why it cannot be requeued")
    prompt_tokens: int
    max_tokens: int
    adapter: str
    bytes: int


class LetterList(BaseModel):
    """One page of dead letters, the newest ones first."""

    object: Literal["list"] = "list"
    data: list[Letter]


class Rerun(BaseModel):
    """The sequence that runs a dead letter again."""

    sequence: str
    state: Literal["queued", "running", "done", "cancelled"]
    finish_reason: str | None = None
    error: str = ""
    completion_ids: list[int] = Field(default_factory=list)
    text: str = ""


class LetterDetail(BaseModel):
    """A letter in full, or what has become of it."""

    id: str
    object: Literal["deadletter"] = "deadletter"
    letter: Letter | None = Field(description="null once it has been requeued")
    sequence: dict[str, Any] | None = Field(description="prompt ids, sampling and adapter, if they can be read")
    requeued: Rerun | None = Field(description="what has become of it, until an hour after its end")


class Requeued(BaseModel):
    """The answer to a requeue; saying it again changes nothing."""

    id: str
    object: Literal["deadletter.requeued"] = "deadletter.requeued"
    sequence: str = Field(description="id of the new sequence; GET the letter to see what becomes of it")
    requeued: bool = Field(description="false: it had been requeued before")


class DroppedLetter(BaseModel):
    """Answer to the DELETE of a dead letter."""

    id: str
    object: Literal["deadletter.deleted"] = "deadletter.deleted"
    deleted: bool


@router.get("", summary="List dead letters, newest first", responses=error_responses(400, 404))
async def list_letters(
    ring: TheRing,
    model: Annotated[str, Query(description="of one model")] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    before: Annotated[str, Query(description="id of a letter: only older ones of its model")] = "",
) -> LetterList:
    """Sequences that killed their workers, or that no worker could read; each with its reason."""
    return LetterList(data=[_shown(letter) for letter in await ring.dead_letters.list(model, limit, before, asker())])


@router.post("/{letter_id:path}/requeue", summary="Run it again, once", responses=error_responses(404, 409))
async def requeue(ring: TheRing, letter_id: LetterId) -> Requeued:
    """The sequence goes back into its queue. Its client has had the error, and its job keeps the failed sample."""
    sequence, done = await ring.dead_letters.requeue(letter_id)
    return Requeued(id=letter_id, sequence=sequence, requeued=done)


@router.get("/{letter_id:path}", summary="Look at one", responses=error_responses(404))
async def show(ring: TheRing, letter_id: LetterId) -> LetterDetail:
    """The letter with its sequence, or, after a requeue, what has become of it."""
    letter = await ring.dead_letters.get(letter_id)
    life = await ring.dead_letters.second_life(letter_id)
    if letter is None and life is None:
        raise unknown_letter(letter_id)
    sequence = msgspec.to_builtins(letter.spec) if letter is not None and letter.spec is not None else None
    rerun = None
    if life is not None:
        finish = life.finish
        ids = [token for event in life.events for token in event.tokens]
        _, codec = await ring.known(letter_id.rpartition(":")[0])
        rerun = Rerun(
            sequence=life.sequence,
            state=life.state,
            finish_reason=finish.reason if finish else None,
            error=finish.failure if finish else "",
            completion_ids=ids,
            text=codec.decode(ids),
        )
    return LetterDetail(id=letter_id, letter=_shown(letter) if letter else None, sequence=sequence, requeued=rerun)


@router.delete("/{letter_id:path}", summary="Drop it", responses=error_responses(404))
async def drop(ring: TheRing, letter_id: LetterId) -> DroppedLetter:
    """Forget the letter; `deleted` is false when it was not there."""
    return DroppedLetter(id=letter_id, deleted=await ring.dead_letters.drop(letter_id))


def _shown(letter: DeadLetter) -> Letter:
    fields = letter._asdict()
    spec, size = fields.pop("spec"), fields.pop("size")
    return Letter(
        **fields,
        requeueable=spec is not None,
        prompt_tokens=len(spec.prompt_ids) if spec else 0,
        max_tokens=spec.sampling.max_tokens if spec else 0,
        adapter=spec.adapter if spec else "",
        bytes=size,
    )
