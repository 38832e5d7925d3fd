"""What was given up is kept, can be looked at, and runs again exactly once."""

import asyncio

import msgspec
import pytest
from redis.asyncio import Redis

from shared.errors import ConflictError, UnknownDeadLetterError
from shared.frames import Finish
from shared.redis import keys
from shared.redis.queue.dead_letters import DeadLetters, Unusable, bury
from shared.redis.tokens.writer import FrameWriter
from shared.sequences import SCHEMA, encode
from tests.redis.sequences import MODEL, die, ending, gathered, ids, plan, queue, spec, tokens


@pytest.fixture
async def letters(redis: Redis) -> DeadLetters:
    await redis.zadd(keys.models(), {MODEL: 1})
    await redis.expire(keys.models(), 60)
    return DeadLetters(redis)


async def killed(redis: Redis, seq: str, job: str = "") -> None:
    """A sequence whose workers die until it is given up."""
    q = queue(redis)
    await q.enqueue([spec(seq, job=job, kind="batch" if job else "interactive")])
    for worker in ("w1", "w2", "w3"):
        claims = await q.claim(worker, plan(1, batch_first=1, empty=True))
        assert ids(claims) == [seq]
        await die(redis, claims)
        assert await q.reap("reaper", 0) == []


async def test_a_poisonous_sequence_is_kept_with_its_spec_and_runs_again_once(
    redis: Redis, letters: DeadLetters
) -> None:
    await killed(redis, "bad", job="j")
    (letter,) = await letters.list()
    assert (letter.model, letter.sequence, letter.job, letter.worker) == (MODEL, "bad", "j", "reaper")
    assert "died 3 times" in letter.reason
    assert letter.spec is not None and letter.spec.prompt_ids == (1, 2)
    assert await letters.get(letter.id) == letter

    answers = await asyncio.gather(*(letters.requeue(letter.id) for _ in range(8)), return_exceptions=True)
    done = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert [new for _, new in done].count(True) == 1
    assert len({seq for seq, _ in done}) == 1
    assert await letters.list() == []
    assert await letters.requeue(letter.id) == (done[0][0], False)

    (claim,) = await queue(redis).claim("w", plan(4, batch_first=4))
    assert (claim.spec.id, claim.spec.sequence_class, claim.attempt) == (done[0][0], "batch", 1)
    assert (claim.spec.job, claim.spec.api, claim.spec.prompt_ids) == ("", "", (1, 2))
    last = tokens(claim.spec.id, 0, 3, finish=Finish("stop"))
    assert await FrameWriter(redis, MODEL, "w").write({}, {}, [ending(claim, [last], "w")]) == [True]
    life = await letters.second_life(letter.id)
    assert life is not None and (life.state, life.finish) == ("done", Finish("stop"))
    assert [token for event in life.events for token in event.tokens] == [1000, 1001, 1002]
    assert len(await gathered(redis, "j")) == 1, "the job has the failure, and nothing else"
    assert await letters.requeue(letter.id) == (done[0][0], False), "also after its end"


async def test_letters_are_listed_newest_first_and_page_by_page(redis: Redis, letters: DeadLetters) -> None:
    for seq in ("a", "b", "c"):
        await killed(redis, seq)
    first = await letters.list(limit=2)
    assert [letter.sequence for letter in first] == ["c", "b"]
    assert [letter.sequence for letter in await letters.list(before=first[-1].id)] == ["a"]
    assert await letters.drop(first[0].id)
    assert not await letters.drop(first[0].id)
    assert [letter.sequence for letter in await letters.list(MODEL)] == ["b", "a"]


async def test_a_spec_of_a_newer_version_is_kept_and_refused_until_somebody_can_read_it(
    redis: Redis, letters: DeadLetters
) -> None:
    q = queue(redis)
    newer = encode(msgspec.structs.replace(spec("new", job="j"), schema=SCHEMA + 1))
    await q.enqueue([spec("new", job="j")])
    await redis.hset(keys.sequence(MODEL, "new"), "spec", newer)
    assert await q.claim("w", plan(4)) == []
    (result,) = await gathered(redis, "j")
    assert result.finish.error_code == "incompatible_version"
    newer_schema = f"schema {SCHEMA + 1}"
    assert newer_schema in result.finish.error_message
    (letter,) = await letters.list()
    assert newer_schema in letter.unreadable
    with pytest.raises(ConflictError, match=newer_schema):
        await letters.requeue(letter.id)
    assert len(await letters.list()) == 1


async def test_a_message_that_nobody_can_read_is_taken_out_and_kept(redis: Redis, letters: DeadLetters) -> None:
    stream = keys.finished(MODEL, "j")
    entry = (await redis.xadd(stream, {"x": b"\xff"})).decode()
    await redis.expire(stream, 60)
    found = Unusable(stream, entry, "?", "unreadable: no result", "runner", b"\xff")
    assert await bury(redis, MODEL, found)
    assert not await bury(redis, MODEL, found)
    assert await redis.xlen(stream) == 0
    (letter,) = await letters.list()
    assert letter.stream == stream and letter.size == 1
    with pytest.raises(ConflictError):
        await letters.requeue(letter.id)


NO_LETTERS = (
    "",
    "m",
    "m:",
    ":1-0",
    "m:1",
    "m:1-x",
    "m:-",
    "m:٣-0",
    f"m:{2**70}-0",
    f"m:{2**64}-0",
    f"m:1-{'9' * 5000}",
)


@pytest.mark.parametrize("letter_id", [*NO_LETTERS, "m:1-1", f"m:{2**64 - 1}-{2**64 - 1}"])
async def test_an_id_of_no_letter_is_refused(letters: DeadLetters, letter_id: str) -> None:
    with pytest.raises(UnknownDeadLetterError):
        await letters.requeue(letter_id)


@pytest.mark.parametrize("letter_id", NO_LETTERS[1:])
async def test_a_page_behind_no_letter_is_refused(letters: DeadLetters, letter_id: str) -> None:
    with pytest.raises(UnknownDeadLetterError):
        await letters.list(before=letter_id)
