"""How likely a model finds each of some continuations of a prompt: the exact log-probability of every one.

Each pair is a sequence of kind "score" in the same queue; equal prompts share their KV through the prefix cache.
"""

from msgspec.structs import replace

from api.generation.plan import check_prompts, plain_sequences
from api.generation.running import gather_all
from api.generation.target import Target
from api.ring.ring import Ring
from shared.errors import ContextLengthExceededError, InvalidRequestError

MAX_PAIRS = 4096


async def log_probabilities(
    ring: Ring, target: Target, prompts: list[list[int]], continuations: list[list[int]], param: str
) -> list[list[float]]:
    """log P(continuation | prompt) of every pair, fp32, summed over its tokens."""
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
    sequences = plain_sequences("score", target, settings, [prompt for prompt, _ in pairs], kind="score")
    sequences = replace(sequences, score_ids=tuple(tuple(continuation) for _, continuation in pairs))
    totals = [sum(events[-1].score_logprobs or ()) for events in await gather_all(ring, sequences)]
    width = len(continuations)
    return [totals[at * width : (at + 1) * width] for at in range(len(prompts))]


def check_pairs(prompts: int, continuations: int, param: str) -> None:
    """InvalidRequestError for more pairs than a request may have."""
    if prompts * continuations > MAX_PAIRS:
        raise InvalidRequestError(f"more than {MAX_PAIRS} pairs of prompt and continuation", param=param)
