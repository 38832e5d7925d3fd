r"""A reward of your own: a function that says what an answer is worth.

    mlx_parallm_serve --model models/tiny --port 8000
    mlx_parallm_train --connect-to 127.0.0.1:8000 --task jsonl --dataset examples/sums.jsonl \
        --reward examples.own_reward:nearness --reward-options '{"tolerance": 10}' \
        --adapter near --max-tokens 5 --prompts-per-step 6 --learning-rate 0.001 --steps 20

`exact` gives nothing to an answer that is wrong by one. This reward grows as the answer comes nearer, so the model
hears of every step in the right direction.

The function runs in a process of its own, where it may be slow, break or hang: that costs the one sample, and the log
says which line did it. An `async def` may wait for a service. It returns a number, or a number and its named parts,
which the trainer writes beside the reward.
"""

import re


def nearness(completion: str, reference: str, *, tolerance: float = 10.0) -> tuple[float, dict[str, float]]:
    """1 for the right number, less with its distance, 0 from `tolerance` on or without a number."""
    number = re.fullmatch(r"\s*(-?\d+)\s*", completion)
    if number is None:
        return 0.0, {"number": 0.0, "near": 0.0}
    near = max(0.0, 1.0 - abs(int(number[1]) - int(reference)) / tolerance)
    return near, {"number": 1.0, "near": near}
