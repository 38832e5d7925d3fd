"""A job's samples for people: the histogram of its rewards, lines of a list, and one sample token by token."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from api.callers.fair_pool import aside
from api.http.bodies import LONG_BYTES
from api.ring.ring import Ring
from shared.errors import NotFoundError, UnknownModelError
from shared.jobs import InputLine, JobStatus, read_input
from shared.redis import keys
from shared.redis.jobs.images import job_image
from shared.redis.jobs.ledger import JobLedger
from shared.redis.kept.answer_store import answers_of, live_of
from shared.text.codec import TextCodec
from shared.trajectories import Trajectory

BINS = 20
HISTOGRAM_CHUNKS = 4  # of RESULTS_PER_CHUNK samples, spread over the job
SHOWN = 25  # lines of a page
SNIPPET = 160  # characters
DIGEST_BYTES = 32

_LOG_CONFIDENT = tuple(math.log(p) for p in (0.9, 0.5, 0.2, 0.05))  # part the five shades of a token


class _Rewarded(msgspec.Struct):
    value: float | None = None


class _Line(msgspec.Struct):
    """As much of a trajectory as the histogram wants."""

    reward: _Rewarded | None = None


class Bar(NamedTuple):
    """One bin of a histogram."""

    low: float
    high: float
    samples: int
    share: float  # of the highest bin


class RewardHistogram(NamedTuple):
    """Rewards of a job's samples."""

    bars: list[Bar]
    samples: int
    mean: float
    low: float
    high: float


class TokenView(NamedTuple):
    """One token of a completion."""

    text: str
    shade: int  # 0 the model was sure, 4 it was not
    colour: int  # of its version; -1: the base
    logprob: float | None
    version: str


class SampleView(NamedTuple):
    """One sample, token by token."""

    ordinal: int
    trajectory: Trajectory
    prompt: str
    tokens: list[TokenView]
    versions: list[tuple[str, int]]  # and their colours
    images: list[str]  # of the prompt: SHA-256 of each, hexadecimal


class ListedSample(NamedTuple):
    """One sample in a list."""

    ordinal: int
    trajectory: Trajectory
    snippet: str


async def reward_histogram(ring: Ring, status: JobStatus) -> RewardHistogram | None:
    """Histogram of all samples, or of some chunks spread over a large job; None when no sample has a reward yet."""
    if status.mean_reward is None:
        return None
    chunks = -(-status.counts.total // keys.RESULTS_PER_CHUNK)
    step = max(1, -(-chunks // HISTOGRAM_CHUNKS))
    values: list[float] = []
    for chunk in range(0, chunks, step):
        first = chunk * keys.RESULTS_PER_CHUNK
        for ordinal, line in await ring.jobs.results(status.id, first - 1, keys.RESULTS_PER_CHUNK):
            if ordinal >= first + keys.RESULTS_PER_CHUNK:
                break
            reward = msgspec.json.decode(line, type=_Line).reward
            if reward is not None and reward.value is not None:
                values.append(reward.value)
    return histogram(values)


def histogram(values: Sequence[float]) -> RewardHistogram | None:
    """BINS equal bins from the least to the greatest value; values that are all alike stand in the middle."""
    if not values:
        return None
    low, high = min(values), max(values)
    width = (high - low) / BINS
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int((value - low) / width)) if width else BINS // 2] += 1
    top = max(counts)
    bars = [Bar(low + i * width, low + (i + 1) * width, count, count / top) for i, count in enumerate(counts)]
    return RewardHistogram(bars, len(values), sum(values) / len(values), low, high)


async def sample_lines(ring: Ring, job_id: str, after: int) -> list[ListedSample]:
    """The next samples after an ordinal."""
    lines = []
    for ordinal, line in await ring.jobs.results(job_id, after, SHOWN):
        trajectory = msgspec.json.decode(line, type=Trajectory)
        lines.append(ListedSample(ordinal, trajectory, _snippet(trajectory.text or trajectory.error)))
    return lines


class AnswerLine(NamedTuple):
    """An answer that waits for a verdict."""

    name: str
    tenant: str
    prompt: str
    text: str
    note: str
    version: str
    created_ms: int


async def waiting_answers(ring: Ring, tenants: Sequence[str]) -> list[AnswerLine]:
    """The newest answers of these tenants without a verdict, a page at most."""
    owners = {answers_of(tenant): tenant for tenant in tenants}
    lines: list[AnswerLine] = []
    for keeper, answer in await ring.answers.newest(list(owners), SHOWN):
        live = await aside(live_of, answer)
        codec = await _codec(ring, live.model)
        ids = live.trajectory.prompt_ids[-SNIPPET:]
        prompt = codec.decode(ids) if codec else " ".join(map(str, ids))
        version = live.trajectory.spans[-1].version if live.trajectory.spans else ""
        lines.append(
            AnswerLine(
                answer.name,
                owners[keeper],
                _snippet(prompt),
                _snippet(live.trajectory.text),
                answer.note,
                version or live.model,
                live.collected_ms,
            )
        )
    return lines


async def sample_view(ring: Ring, status: JobStatus, ordinal: int) -> SampleView:
    """One sample; NotFoundError when it has not finished."""
    results = await ring.jobs.results(status.id, ordinal - 1, 1) if 0 <= ordinal < status.counts.total else []
    if not results or results[0][0] != ordinal:
        raise NotFoundError(f"sample {ordinal} of {status.id} has not finished, or there is none")
    trajectory = msgspec.json.decode(results[0][1], type=Trajectory)
    codec = await _codec(ring, status.model)
    images = await _images(ring, status.id, trajectory)
    return await aside(_view, ordinal, trajectory, codec, images)


async def answer_view(ring: Ring, tenant: str, name: str) -> SampleView:
    """A stored answer; NotFoundError when it is not there any more."""
    answer = await ring.answers.find(answers_of(tenant), name)
    if answer is None:
        raise NotFoundError("the tokens of this turn are not stored any more")
    live = await aside(live_of, answer)
    return await aside(_view, 0, live.trajectory, await _codec(ring, live.model), [])


def _view(ordinal: int, trajectory: Trajectory, codec: TextCodec | None, images: list[str]) -> SampleView:
    prompt = codec.decode(trajectory.prompt_ids, False) if codec else " ".join(map(str, trajectory.prompt_ids))
    versions = list(dict.fromkeys(span.version for span in trajectory.spans))
    colours = {version: i % 6 if version else -1 for i, version in enumerate(sorted(versions, key=_age))}
    tokens = [_token(codec, trajectory, at, colours) for at in range(len(trajectory.completion_ids))]
    shown = sorted(colours.items(), key=lambda item: _age(item[0]))
    return SampleView(ordinal, trajectory, prompt, tokens, shown, images)


async def _images(ring: Ring, job_id: str, trajectory: Trajectory) -> list[str]:
    """Those of its prompt, as far as the job's inputs are still there."""
    (line,) = await JobLedger(ring.redis).inputs_at(job_id, [trajectory.prompt_index])
    if line is None:
        return []
    named = await aside(_images_of, line) if len(line) > LONG_BYTES else _images_of(line)
    return [image.hex() for image in named]


def _images_of(line: InputLine) -> list[bytes]:
    try:
        given = read_input(line)
    except RecursionError:  # a prompt that cannot be read
        return []
    return [image.sha256 for image in given.images or (given.request.images if given.request else ())]


async def thumbnail(ring: Ring, job_id: str, sha256: str) -> bytes:
    """A small PNG of an image of a job's prompts; NotFoundError when it has none of this hash."""
    try:
        digest = bytes.fromhex(sha256)
    except ValueError:
        digest = b""
    data = await job_image(ring.redis, job_id, digest) if len(digest) == DIGEST_BYTES else None
    if data is None:
        raise NotFoundError(f"job {job_id} has no image {sha256[:64]}")
    return await ring.images.thumbnail(data)


async def _codec(ring: Ring, model: str) -> TextCodec | None:
    try:
        return (await ring.known(model))[1]
    except (UnknownModelError, NotFoundError):  # the registry has forgotten the model
        return None


def _snippet(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SNIPPET else text[:SNIPPET] + "…"


def _token(codec: TextCodec | None, trajectory: Trajectory, at: int, colours: dict[str, int]) -> TokenView:
    token = trajectory.completion_ids[at]
    logprob = trajectory.logprobs[at] if at < len(trajectory.logprobs) else None
    version = next((span.version for span in trajectory.spans if span.start <= at < span.end), "")
    text = codec.token_text(token) if codec else f"{token} "
    return TokenView(text, shade(logprob), colours.get(version, -1), logprob, version)


def shade(logprob: float | None) -> int:
    """0 for a token that the model was sure of, to 4 for one that it hardly expected; 0 when it is not known."""
    if logprob is None:
        return 0
    return sum(logprob < threshold for threshold in _LOG_CONFIDENT)


def _age(version: str) -> tuple[str, int]:
    name, _, number = version.partition("@")
    return name, int(number) if number.isdigit() else 0


def metadata(value: dict[str, Any]) -> str:
    """A job's metadata as JSON."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
