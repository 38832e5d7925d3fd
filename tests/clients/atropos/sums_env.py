"""An Atropos environment, as its users write them: two-digit sums, generated on our server through ManagedServer.

Run by Atropos' Python: `python sums_env.py RUN_API_URL OUR_URL/v1 MODEL_FOLDER`. Imports nothing of ParaLLM.
"""

import asyncio
import random
import sys
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig


class SumsEnv(BaseEnv):  # type: ignore[misc]
    """One point for exactly the right number."""

    name = "sums"

    async def setup(self) -> None:
        self.draw = random.Random(0)

    async def get_next_item(self) -> tuple[int, int]:
        return self.draw.randint(10, 99), self.draw.randint(10, 99)

    async def collect_trajectories(self, item: tuple[int, int]) -> tuple[Any, list[Any]]:
        a, b = item
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=[{"role": "user", "content": f"What is {a} + {b}?"}],
                n=self.config.group_size,
                max_tokens=8,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        replies = [
            self.tokenizer.decode([t for t in n.masked_tokens if t != -100], skip_special_tokens=True) for n in nodes
        ]
        group = {
            "tokens": [n.tokens for n in nodes],
            "masks": [n.masked_tokens for n in nodes],
            "inference_logprobs": [n.logprobs for n in nodes],
            "scores": [float(reply.strip() == str(a + b)) for reply in replies],
        }
        return group, []

    async def postprocess_histories(self, trajectories: Any) -> Any:
        return trajectories

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return None


def main() -> None:
    run_api, server, model = sys.argv[1:]
    config = BaseEnvConfig(
        group_size=8,
        rollout_server_url=run_api,
        tokenizer_name=model,
        use_wandb=False,
        wandb_name="sums",
        max_num_workers=4,
        ensure_scores_are_not_same=False,
        steps_per_eval=100_000,
        max_token_length=128,
        total_steps=100,
    )
    ours = APIServerConfig(
        model_name="policy",
        base_url=server,
        api_key="none",
        tokenizer_name=model,
        server_type="vllm",
        num_requests_for_eval=8,
    )
    asyncio.run(SumsEnv(config, [ours]).env_manager())


if __name__ == "__main__":
    main()
