"""Adapter versions while processes die: heads that classify, and a split whose shares move with rewards.

A text's classification is the one from before. Each reward of an answer that the split chose a version for is counted
once, for the version that answered, however often it was sent and whichever process died.
"""

import asyncio
import itertools
import json
from collections import Counter
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save

from tests.e2e.chaos_load import PROMPTS, Load, bearer, body
from tests.e2e.rings import MODEL
from tests.e2e.served.test_heads import HEADS, tensors_of
from tests.e2e.test_adapters import CONFIG, weights
from tests.waiting import HANG_S, wait_until

NAME, HEADED = "chaos-split", "chaos-heads"
TERMS = {"split": f"{NAME}@1:0.5,{NAME}@2:0.5", "auto": True, "verdict_after": 20_000}
CLOSE = 1e-4  # probabilities of a text that was read in another batch
PAUSE_S = 0.5


class Versions:
    """Classifications and rewards until the load is told to stop."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._labels: list[list[float]] = []  # of each prompt
        self._rewarded: Counter[str] = Counter()  # by version
        self.classified = 0

    async def begin(self, url: str) -> None:
        """Upload the versions, begin the split, and learn what the head says."""
        headed = {**CONFIG, "heads": HEADS}
        made = [(NAME, weights(seed), CONFIG) for seed in (1, 2)] + [(HEADED, weights(1) | tensors_of(1), headed)]
        async with httpx.AsyncClient(base_url=url, timeout=HANG_S, headers=bearer(self._load.ring.key)) as http:
            for name, tensors, config in made:
                files = {
                    "a": ("adapters.safetensors", save(tensors)),
                    "c": ("adapter_config.json", json.dumps(config).encode()),
                }
                answer = await http.post("/upload_adapter", data={"name": name, "model": MODEL}, files=files)
                assert answer.status_code == 200, answer.text
            (await http.put(f"/v1/adapters/{NAME}/split", json=TERMS)).raise_for_status()
            said = (await http.post("/v1/classifications", json=_asked())).raise_for_status().json()
            self._labels = [each["probs"] for each in said["data"]]

    async def run(self) -> None:
        """Classify, ask and reward."""
        async with self._load.client(httpx.Timeout(20, connect=2)) as http:
            for number in itertools.count():
                if self._load.stopping:
                    return
                said = await self._load.patiently(http, "/v1/classifications", _asked())
                if said is not None:
                    found = np.array([each["probs"] for each in said.json()["data"]])
                    if np.abs(found - np.array(self._labels)).max() > CLOSE:
                        self._load.report.violation(f"another classification: {found.tolist()}")
                    self.classified += 1
                await self._reward(http, number)
                await asyncio.sleep(PAUSE_S)

    async def _reward(self, http: httpx.AsyncClient, number: int) -> None:
        asked = body(PROMPTS[number % len(PROMPTS)], 4) | {"model": NAME, "user": f"user {number % 40}"}
        answer = await self._load.patiently(http, "/v1/completions", asked)
        if answer is None:
            return
        version = f"{NAME}@{answer.json()['system_fingerprint'].rpartition('@')[2]}"
        reward = {"id": answer.json()["id"], "reward": 1.0 if version.endswith("@2") else 0.5}
        told = [await self._load.patiently(http, "/v1/feedback", reward, retried=(404,)) for _ in range(2)]
        if any(each is not None and each.json()["status"] == "counted" for each in told):
            self._rewarded[version] += 1

    async def check(self) -> None:
        """The split has counted each reward once."""
        state: dict[str, Any] = {}
        async with httpx.AsyncClient(timeout=HANG_S, headers=bearer(self._load.ring.key)) as http:

            async def all_counted() -> bool:
                state.update((await http.get(f"{self._load.api_url()}/v1/adapters/{NAME}/split")).json())
                return {each["id"]: each["rewards"] for each in state["versions"]} == dict(self._rewarded)

            try:
                await wait_until(all_counted)
            except AssertionError:
                self._load.report.violation(f"the split has counted {state['versions']}, sent were {self._rewarded}")
        shares = {each["id"]: round(each["share"], 2) for each in state["versions"]}
        print(f"classifications: {self.classified}; split: rewards {dict(self._rewarded)}, shares then {shares}")


def _asked() -> dict[str, Any]:
    return {"model": HEADED, "head": "topic", "input": PROMPTS}
