"""An agent of its own, which knows nothing of ParaLLM: it asks its model for a sum.

    mlx_parallm_serve --model models/tiny --port 8000
    mlx_parallm_train --connect-to 127.0.0.1:8000 --task trainer.rollouts.agents.environment:Agent \
        --task-options '{"command": ["python3", "examples/sums_agent.py"]}' --max-tokens 5 \
        --prompts-per-step 8 --group-size 8 --steps 30 --learning-rate 0.001

Any program that asks OpenAI's chat endpoint learns so: its `base_url` and key are in its environment, its exit code is
the reward. This one needs Python's own library alone, and starts in a moment.
"""

import json
import os
import sys
import urllib.request

TASKS = 16


def asked(messages: list[dict[str, str]]) -> str:
    """The model's next message."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        said: str = json.load(answer)["choices"][0]["message"]["content"]
    return said


def main() -> int:
    """0 if the model gives the right sum at once; 1 if not."""
    number = int(os.environ["PARALLM_TASK"]) % TASKS
    first, second = 12 + 3 * number, 35 + 2 * number
    said = asked([{"role": "user", "content": f"{first}+{second}="}])
    return int(said.strip() != str(first + second))


if __name__ == "__main__":
    sys.exit(main())
