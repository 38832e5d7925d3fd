"""What the demo asks: our arithmetic distribution, and real GSM8K questions."""

import json
import random
from pathlib import Path
from typing import Any

PHRASES = ("{}+{}=", "{} + {} = ?", "What is {} + {}?", "what is {} plus {}?", "Add {} and {}.")
GSM8K = Path("data/gsm8k/test-64.jsonl")


def arithmetic_job(model: str, prompts: int = 64, samples: int = 8) -> dict[str, Any]:
    """Body of a rollout job: two-digit additions, rewarded when the answer is exact."""
    draw = random.Random(0)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(prompts)]
    return {
        "kind": "rollout",
        "model": model,
        "prompts": [_user(draw.choice(PHRASES).format(a, b)) for a, b in pairs],
        "references": [str(a + b) for a, b in pairs],
        "n": samples,
        "max_tokens": 8,
        "temperature": 1.0,
        "seed": 1,
        "reward": {"name": "exact"},
        "metadata": {"demo": "arithmetic"},
    }


def gsm8k_job(model: str, samples: int = 2) -> dict[str, Any]:
    """Body of a rollout job: the committed excerpt of GSM8K's test set with the gsm8k reward."""
    lines = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    return {
        "kind": "rollout",
        "model": model,
        "prompts": [_user(line["question"]) for line in lines],
        "references": [line["answer"] for line in lines],
        "n": samples,
        "max_tokens": 64,
        "temperature": 0.7,
        "seed": 2,
        "reward": {"name": "gsm8k"},
        "metadata": {"demo": "gsm8k"},
    }


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
