"""How likely a model finds each of some continuations of a prompt: the exact log-probability of every one.

Each pair is a sequence of kind "score" in the same queue; equal prompts share their KV through the prefix cache.
"""

import uuid

from fastapi import Request

from api.generation.running import gather_all
from api.generation.sampling import check_prompts, deadline
from api.generation.target import Target
from api.generation.work import Work
from api.ring.ring import Ring
from shared.errors import ContextLengthExceededError, InvalidRequestError
from shared.sequences import SamplingParams

MAX_PAIRS = 4096


async def log_probabilities(
    ring: Ring, request: Request, target: Target, prompts: list[list[int]], continuations: list[list[int]], param: str
) -> list[list[float]] | None:
    """log P(continuation | prompt) of every pair, fp32, summed over its tokens; None when the client has left."""
    card, settings = target.served.card, ring.settings
    check_pairs(len(prompts), len(continuations), param)
    pairs = [(prompt, continuation) for prompt in prompts for continuation in continuations]
    check_prompts(prompts, card, settings, param)
    check_prompts(continuations, card, settings, param)
    longest = max(map(len, prompts)) + max(map(len, continuations))
    if longest > (most := settings.max_prompt_tokens or card.context_length):
        raise ContextLengthExceededError(
            f"a prompt with its continuation has {longest} tokens; this server takes up to {most}", param=param
        )
    work = Work(
        id=f"score-{uuid.uuid4().hex}",
        model=card.name,
        prompts=tuple(tuple(prompt) for prompt, _ in pairs),
        sampling=SamplingParams(max_tokens=0, seed=0),
        kind="score",
        adapter=target.adapter,
        adapter_policy=target.policy,
        deadline_ms=deadline(settings),
        score_ids=tuple(tuple(continuation) for _, continuation in pairs),
    )
    gathered = await gather_all(ring, request, work)
    if gathered is None:
        return None
    totals = [sum(events[-1].score_logprobs or ()) for events in gathered]
    width = len(continuations)
    return [totals[at * width : (at + 1) * width] for at in range(len(prompts))]


def check_pairs(prompts: int, continuations: int, param: str) -> None:
    """InvalidRequestError for more pairs than a request may have."""
    if prompts * continuations > MAX_PAIRS:
        raise InvalidRequestError(f"more than {MAX_PAIRS} pairs of prompt and continuation", param=param)
