"""verifiers' token-in/token-out route: its renderer's client calls /inference/v1/generate and checks every logprob."""

import asyncio
import math
import os
from importlib.metadata import version

from openai import AsyncOpenAI
from renderers import create_renderer
from renderers.client import generate
from renderers.configs import DefaultRendererConfig
from transformers import AutoTokenizer


async def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(os.environ["PARALLM_MODEL_DIR"])
    client = AsyncOpenAI(base_url=os.environ["PARALLM_URL"] + "/v1", api_key="none")
    reply = await generate(
        client=client,
        renderer=create_renderer(tokenizer, DefaultRendererConfig()),
        messages=[{"role": "user", "content": "12+35="}],
        model=os.environ["PARALLM_MODEL_NAME"],
        sampling_params={"max_tokens": 8, "temperature": 1.0, "seed": 3},
    )
    assert len(reply["completion_ids"]) == len(reply["completion_logprobs"]) > 0
    assert all(math.isfinite(logprob) and logprob <= 0 for logprob in reply["completion_logprobs"])
    templated = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12+35="}], add_generation_prompt=True, return_dict=False
    )
    assert reply["prompt_ids"] == list(templated)
    print(f"verifiers {version('verifiers')}, renderers {version('renderers')}: {reply['content']!r}")


asyncio.run(main())
