"""The teacher's scores of a data set, asked of the ring: a model, or an adapter version, that is served there.

Each row goes to `POST /inference/v1/generate` as token ids, with `prompt_logprobs`: through the queue to a worker as
every request. The answers become a file in the run's folder, so a resumed run learns from the same scores.

Invariants. Teacher and student have the same tokenizer, by its hash, so that ids mean the same. All rows were scored by
one version of the teacher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from shared.errors import SetupError
from trainer.learn.batches import SampleGroup
from trainer.learners.distilling import ScoredRow
from trainer.ring.http_client import HttpApi

FILE = "teacher.jsonl"  # in the run's folder
AT_ONCE = 32

log = structlog.get_logger()


class _Tokenizer(msgspec.Struct):
    tokenizer_sha256: str


class _Token(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Span(msgspec.Struct):
    version: str


class _Choice(msgspec.Struct):
    finish_reason: str | None
    weight_versions: list[_Span] = []


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    prompt_logprobs: list[dict[str, _Token] | None] | None = None


async def scored(
    api: HttpApi, teacher: str, top_k: int, rows: Sequence[SampleGroup], tokenizer_sha256: str
) -> list[ScoredRow]:
    """The rows with the teacher's scores; SetupError when it has another tokenizer, or changes meanwhile."""
    info = await api.call("GET", "/tokenizer_info", _Tokenizer, model=teacher)
    if info.tokenizer_sha256 != tokenizer_sha256:
        raise SetupError(
            f"the teacher {teacher} has another tokenizer than this model: the same token ids would be other words"
        )
    room, versions, done = asyncio.Semaphore(AT_ONCE), set[str](), 0

    async def score(row: SampleGroup) -> ScoredRow:
        nonlocal done
        async with room:
            line, spans = await _score(api, teacher, top_k, row)
        versions.update(spans)
        done += 1
        if done % 500 == 0:
            log.info("teacher.scores", rows=done, of=len(rows))
        return line

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(score(row)) for row in rows]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    if len(versions) > 1:
        raise SetupError(f"the teacher {teacher} became another version meanwhile: name one, as in {teacher}@1")
    log.info("teacher.has_scored", rows=len(rows), version=next(iter(versions), "") or teacher)
    return [task.result() for task in tasks]


async def logprob(api: HttpApi, teacher: str, prompt_ids: Sequence[int], reply_ids: Sequence[int]) -> float:
    """Log-probability of a whole reply by the teacher, in nats."""
    tokens, _ = await _tokens(api, teacher, 1, prompt_ids, reply_ids)
    return sum(token[str(id_)].logprob for token, id_ in zip(tokens, reply_ids, strict=True))


async def _score(api: HttpApi, teacher: str, top_k: int, row: SampleGroup) -> tuple[ScoredRow, set[str]]:
    (sample,) = row.samples
    tokens, spans = await _tokens(api, teacher, top_k, row.prompt_ids, sample.completion_ids)
    tops = [_top(token) for token, counts in zip(tokens, sample.mask, strict=True) if counts]
    line = ScoredRow(
        teacher, row.prompt_ids, sample.completion_ids, sample.mask,
        tuple(ids for ids, _ in tops), tuple(logprobs for _, logprobs in tops), top_k=top_k,
    )  # fmt: skip
    return line, spans


async def _tokens(
    api: HttpApi, teacher: str, top_k: int, prompt_ids: Sequence[int], reply_ids: Sequence[int]
) -> tuple[list[dict[str, _Token]], set[str]]:
    """The likeliest tokens in place of each of a reply's, its own among them, and the versions that said so."""
    sampling: dict[str, Any] = {"max_tokens": 1, "prompt_logprobs": top_k, "temperature": 1.0, "seed": 0}
    body = {"model": teacher, "token_ids": [*prompt_ids, *reply_ids], "sampling_params": sampling}
    answer = await api.call("POST", "/inference/v1/generate", _Answer, body)
    said = (answer.prompt_logprobs or [])[len(prompt_ids) :]
    tokens = [token for token in said if token is not None]
    if len(said) != len(reply_ids) or len(tokens) != len(said):
        raise SetupError(f"{api.url} does not say how likely the teacher {teacher} takes each token of a prompt to be")
    return tokens, {span.version for choice in answer.choices for span in choice.weight_versions}


def _top(tokens: dict[str, _Token]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The ranked tokens, the likeliest first: the row's own token is included, whatever its rank."""
    ranked = sorted((said.rank, int(token), said.logprob) for token, said in tokens.items() if said.rank is not None)
    return tuple(token for _, token, _ in ranked), tuple(logprob for _, _, logprob in ranked)


def read_kept(file: Path, teacher: str, top_k: int) -> list[ScoredRow]:
    """The scores that the run began with; SetupError when it began with others."""
    ways = "give another --run, or --resume no"
    try:
        rows = [msgspec.json.decode(line, type=ScoredRow) for line in file.read_bytes().splitlines()]
    except OSError as error:
        raise SetupError(f"{file.parent} holds a run without a teacher: {ways}") from error
    except msgspec.DecodeError as error:
        raise SetupError(f"{file} holds no teacher's scores: {ways} ({error})") from error
    if not rows or rows[0].teacher != teacher:
        raise SetupError(f"{file.parent} holds a run whose teacher is {rows[0].teacher if rows else 'none'}: {ways}")
    if rows[0].top_k not in (0, top_k):
        raise SetupError(f"{file.parent} holds a run with --teacher-top-k {rows[0].top_k}: {ways}")
    return rows
