r"""An app whose model learns from its users: it streams answers, reports which ones they liked, and gets better.

    mlx_parallm_serve --model models/tiny --port 8000 --redis-port 36379 --feedback-ttl-days 1
    mlx_parallm_train --redis redis://127.0.0.1:36379 --model models/tiny --adapter app --source live \
        --live-trajectories 96 --learning-rate 0.002 --lora-rank 16 --lora-scale 2 --steps 20
    python examples/feedback_app.py --url http://127.0.0.1:8000 --model app

`--feedback-ttl-days` makes the server store its answers for so long, so that a verdict can come later. The app needs
nothing but the id of an answer: verdicts become samples of the policy, and the trainer takes a step whenever it has
`--live-trajectories` of them. Requests for `app` get its newest version, without any change in the app.

The users are played here, by `likes`: replace it by two buttons.
"""

import argparse
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
from openai import OpenAI

READY_S = 60.0  # a trainer has to be there by then


def likes(question: tuple[int, int], answer: str) -> bool:
    """True if the user presses "thumbs up"."""
    return answer.strip() == str(sum(question))


def main() -> None:
    """Answer rounds of questions, and print how many answers were liked."""
    parser = argparse.ArgumentParser(description="an app that gives feedback")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="app", help="the policy of a trainer with `--source live`")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--users", type=int, default=8, help="asking at the same time")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()

    client = OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key)
    wait_for(client, options.model)
    draw = random.Random(1)
    questions = [(draw.randrange(10, 50), draw.randrange(10, 50)) for _ in range(12)] * options.users
    for number in range(options.rounds):
        with ThreadPoolExecutor(options.users) as pool:
            liked = list(pool.map(lambda question: ask_and_judge(client, options, question), questions))
        print(f"round {number}: {sum(liked) / len(liked):.0%} of {len(liked)} answers were liked", flush=True)


def wait_for(client: OpenAI, model: str) -> None:
    """Return once the trainer has published the version that it begins with."""
    deadline = time.monotonic() + READY_S
    while all(each.id != model for each in client.models.list()):
        if time.monotonic() > deadline:
            raise SystemExit(f"no trainer publishes {model!r}: start one as this file's first lines say")
        time.sleep(0.1)


def ask_and_judge(client: OpenAI, options: argparse.Namespace, question: tuple[int, int]) -> bool:
    """One user: reads the answer as it is written, and says whether it was any good."""
    a, b = question
    answer, answer_id = "", ""
    with client.chat.completions.create(
        model=options.model, messages=[{"role": "user", "content": f"What is {a} + {b}?"}], max_tokens=5, stream=True
    ) as chunks:
        for chunk in chunks:
            answer_id = chunk.id
            answer += "".join(choice.delta.content or "" for choice in chunk.choices)  # an app shows each piece
    liked = likes(question, answer)
    httpx.post(
        f"{options.url}/v1/feedback",
        json={"id": answer_id, "rating": "up" if liked else "down"},
        headers={"Authorization": f"Bearer {options.api_key}"},
        timeout=60,
    ).raise_for_status()
    return liked


if __name__ == "__main__":
    main()
