"""Prompts of the demo: our arithmetic distribution, and real GSM8K questions."""

import json
import random
from pathlib import Path

from api.cli.client import JobRequest
from shared.jobs import JobInput, RewardSpec

PHRASES = ("{}+{}=", "{} + {} = ?", "What is {} + {}?", "what is {} plus {}?", "Add {} and {}.")
PROMPTS = 64
GSM8K = Path("data/gsm8k/test-64.jsonl")


def jobs_of(model: str) -> dict[str, tuple[JobRequest, list[JobInput]]]:
    """Two rollout jobs: two-digit additions, and the committed excerpt of GSM8K's test set; each with its reward."""
    return {
        "arithmetic": (_rollouts(model, "arithmetic", "exact", 1, n=8, max_tokens=8, temperature=1.0), _additions()),
        "gsm8k": (_rollouts(model, "gsm8k", "gsm8k", 2, n=2, max_tokens=64, temperature=0.7), _word_problems()),
    }


def _rollouts(
    model: str, name: str, reward: str, seed: int, *, n: int, max_tokens: int, temperature: float
) -> JobRequest:
    return JobRequest(
        kind="rollout",
        model=model,
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        reward=RewardSpec(reward),
        metadata={"demo": name},
    )


def _additions() -> list[JobInput]:
    draw = random.Random(0)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(PROMPTS)]
    return [_question(draw.choice(PHRASES).format(a, b), str(a + b)) for a, b in pairs]


def _word_problems() -> list[JobInput]:
    lines = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    return [_question(line["question"], line["answer"]) for line in lines]


def _question(text: str, answer: str) -> JobInput:
    return JobInput([{"role": "user", "content": text}], answer)
