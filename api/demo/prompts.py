"""What the demo asks: our arithmetic distribution, and real GSM8K questions."""

import json
import random
from pathlib import Path

from api.cli.client import JobRequest
from shared.jobs import JobInput, Message, RewardSpec

PHRASES = ("{}+{}=", "{} + {} = ?", "What is {} + {}?", "what is {} plus {}?", "Add {} and {}.")
GSM8K = Path("data/gsm8k/test-64.jsonl")


def arithmetic_job(model: str, prompts: int = 64, samples: int = 8) -> tuple[JobRequest, list[JobInput]]:
    """A rollout job of two-digit additions, rewarded when the answer is exact."""
    draw = random.Random(0)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(prompts)]
    request = JobRequest(
        kind="rollout",
        model=model,
        n=samples,
        max_tokens=8,
        temperature=1.0,
        seed=1,
        reward=RewardSpec("exact"),
        metadata={"demo": "arithmetic"},
    )
    return request, [JobInput(_user(draw.choice(PHRASES).format(a, b)), str(a + b)) for a, b in pairs]


def gsm8k_job(model: str, samples: int = 2) -> tuple[JobRequest, list[JobInput]]:
    """A rollout job of the committed excerpt of GSM8K's test set, with the gsm8k reward."""
    lines = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    request = JobRequest(
        kind="rollout",
        model=model,
        n=samples,
        max_tokens=64,
        temperature=0.7,
        seed=2,
        reward=RewardSpec("gsm8k"),
        metadata={"demo": "gsm8k"},
    )
    return request, [JobInput(_user(line["question"]), line["answer"]) for line in lines]


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]
