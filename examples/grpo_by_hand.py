"""All of reinforcement learning against a running ring, over HTTP: GRPO in one file.

    mlx_parallm_serve --mode inference_and_training --train-config examples/posted.yaml --model models/tiny --port 8000
    python examples/grpo_by_hand.py --url http://127.0.0.1:8000 --steps 10

The server samples, scores, computes gradients and serves the new weights. This program decides what is asked, how an
answer compares with its siblings, and when the model learns from it. A step of it has four parts:

1. A job draws `--group-size` answers to every question from the newest version of the policy, and scores them.
2. An answer's advantage is its reward minus the mean of its group: better than its siblings, or worse.
3. The answers go back with their advantages. The trainer takes one step, checks the new version, and publishes it.
4. The mean reward is printed. Since version 1 is the untrained model, the first line is what it can do by itself.
"""

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx

Row = dict[str, Any]  # a line of a job's results: token ids, log-probabilities, versions, reward

POLL_S = 0.05
ENDED = ("succeeded", "failed", "cancelled", "expired")


def main() -> None:
    """Learn for `--steps` steps."""
    parser = argparse.ArgumentParser(description="GRPO over HTTP")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--policy", default="policy", help="the name under which the trainer publishes its versions")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=16, help="answers to a question")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()

    questions = list(sums(options.questions))
    headers = {"Authorization": f"Bearer {options.api_key}"}
    with httpx.Client(base_url=options.url, headers=headers, timeout=120) as http:
        wait_for_policy(http, options.policy)
        for step in range(options.steps):
            rows = rollouts(http, options.policy, questions, options.group_size, seed=step)
            update = learn(http, options.policy, rows, advantages(rows))
            rewards = [row["reward"]["value"] for row in rows]
            print(f"step {step}: mean reward {sum(rewards) / len(rewards):.3f}, now {update['lora']}", flush=True)


def sums(count: int) -> Iterator[tuple[str, str]]:
    """Questions with their right answers. The tiny model is right now and then, and that is what it can learn from."""
    draw = random.Random(1)
    for _ in range(count):
        a, b = draw.randrange(10, 50), draw.randrange(10, 50)
        yield f"What is {a} + {b}?", str(a + b)


def wait_for_policy(http: httpx.Client, policy: str) -> None:
    """Return once the trainer has published the version that it begins with."""
    while True:
        status = http.get("/v1/training/status", params={"policy": policy})
        if status.status_code == 200 and status.json()["current_lora"]:
            return
        time.sleep(POLL_S)


def rollouts(
    http: httpx.Client, policy: str, questions: list[tuple[str, str]], group_size: int, seed: int
) -> list[Row]:
    """Answers to all questions, scored: a job is submitted, waited for, and read."""
    job = checked(
        http.post(
            "/v1/jobs",
            json={
                "kind": "rollout",
                "model": policy,
                "prompts": [[{"role": "user", "content": question}] for question, _ in questions],
                "references": [answer for _, answer in questions],
                "n": group_size,
                "max_tokens": 5,
                "temperature": 1.0,  # the distribution that is to be improved
                "seed": seed,
                "reward": {"name": "exact"},
            },
        )
    )
    while job["status"] not in ENDED:
        time.sleep(POLL_S)
        job = checked(http.get(f"/v1/jobs/{job['id']}"))
    if job["status"] != "succeeded":
        raise SystemExit(f"job {job['id']} {job['status']}: {job.get('error')}")
    with http.stream("GET", f"/v1/jobs/{job['id']}/results") as results:
        rows = [json.loads(line) for line in results.iter_lines()]
    return [row for row in rows if not row.get("error")]  # a sample may fail on its own, with the reason


def advantages(rows: list[Row]) -> list[float]:
    """How much better each answer is than the mean of its group: the group stands in for a value network."""
    groups: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        groups[row["prompt_index"]].append(row["reward"]["value"])
    means = {prompt: sum(rewards) / len(rewards) for prompt, rewards in groups.items()}
    return [row["reward"]["value"] - means[row["prompt_index"]] for row in rows]


def learn(http: httpx.Client, policy: str, rows: list[Row], advantage: list[float]) -> Row:
    """One train step; the answer says which version is served now.

    A row has what the loss needs besides the advantage: the sampler's log-probability of every token, and the version
    that drew it. Groups whose answers are all right, or all wrong, have nothing to teach and stay out.
    """
    taught = [{**row, "advantage": value} for row, value in zip(rows, advantage, strict=True) if value]
    update = checked(http.post("/v1/training/update", json={"policy": policy, "trajectories": taught}))
    if update["status"] == "rejected":
        raise SystemExit(f"the new version did not pass the gate, the old one is served on: {update['gate']}")
    return update


def checked(answer: httpx.Response) -> Row:
    """The answer's body; ends the program with the server's words when it refuses."""
    if answer.is_error:
        raise SystemExit(f"{answer.request.url}: {answer.status_code} {answer.text}")
    body: Row = answer.json()
    return body


if __name__ == "__main__":
    main()
