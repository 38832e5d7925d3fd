"""What acts and what is judged while processes die, and what must be true of it.

A recurrent network keeps its state in sessions: each step is made once, and says what numpy says of the steps before
it, whoever has computed them. An answer that a client has got is kept until somebody judges it, over any api; each
verdict that was counted is one trajectory of its policy's trainer at the end.
"""

import asyncio
import itertools
import json
import re
from collections import Counter
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save

from shared.redis.connection.client import connect
from shared.redis.training.trajectory_queue import TrajectoryQueue
from tests.e2e.chaos_load import PROMPTS, Load, bearer, body
from tests.unit.networks import LSTM, Array, computed, inputs_of, weights_of
from tests.waiting import HANG_S, wait_until

NAME, POLICY = "chaos-network", "policy"
STEPS = 12  # of a session
PAUSE_S = 0.3  # between two steps, and two verdicts: other clients want their share
_MADE = re.compile(r"has made (\d+) steps")


class Policies:
    """Sessions and verdicts until the load is told to stop."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.steps = 0  # that were answered
        self.unseen = 0  # that were made, and whose answer was lost
        self.judged: dict[str, float] = {}  # rewards by the answer's id
        self._observed = inputs_of(LSTM, STEPS)["observation"]
        self._wanted: list[Array] = []

    async def begin(self, url: str) -> None:
        """Serve the network, and compute what it will say."""
        weights, state = weights_of(LSTM), {}
        files = {
            "a": ("adapters.safetensors", save(weights)),
            "c": ("adapter_config.json", json.dumps({"network": LSTM}).encode()),
        }
        async with httpx.AsyncClient(base_url=url, timeout=HANG_S, headers=bearer(self.load.ring.key)) as http:
            (await http.post("/upload_adapter", data={"name": NAME}, files=files)).raise_for_status()
        for row in self._observed:
            said: dict[str, Array] = computed(LSTM, weights, {"observation": row[None], **state})
            state = {name: each for name, each in said.items() if name.startswith("memory.")}
            logits = said["action_logits"][0]
            self._wanted.append(np.exp(logits) / np.exp(logits).sum())

    # -- sessions

    async def act(self) -> None:
        """One session after another."""
        async with self.load.client(httpx.Timeout(20, connect=2)) as http:
            for number in itertools.count():
                made = 0
                while made < STEPS and not self.load.stopping:
                    made = await self._step(http, f"chaos-{number}", made)
                    await asyncio.sleep(PAUSE_S)
                if self.load.stopping:
                    return

    async def _step(self, http: httpx.AsyncClient, session: str, made: int) -> int:
        """The steps that the session has made then."""
        asked: dict[str, Any] = {"model": NAME, "session_id": session, "observations": [self._observed[made].tolist()]}
        asked |= {"session_step": made} if made else {"reset": True}
        answer = await self.load.patiently(http, "/v1/rl/act", asked, retried=(409,), told=_MADE.pattern)
        if answer is None:
            return made
        if answer.status_code == 409:
            told = _MADE.search(answer.text)
            if told is None or int(told[1]) != made + 1:
                self.load.report.violation(f"session {session} after {made} steps: {answer.text[:300]}")
                return STEPS
            self.unseen += 1
            return made + 1
        said = answer.json()
        apart = np.abs(np.array(said["action_probs"][0]) - self._wanted[made]).max()
        if said["session_step"] != made + 1 or apart > 1e-5:
            self.load.report.violation(f"session {session}: step {said['session_step']} after {made}, apart {apart}")
        self.steps += 1
        return made + 1

    # -- verdicts

    async def judge(self) -> None:
        """One answer after another, each judged twice, the same."""
        async with self.load.client(httpx.Timeout(20, connect=2)) as http:
            for number in itertools.count():
                if self.load.stopping:
                    return
                prompt = PROMPTS[number % len(PROMPTS)]
                answer = await self.load.patiently(http, "/v1/completions", body(prompt, 4))
                if answer is None:
                    continue
                verdict = {"id": answer.json()["id"], "reward": number / 1000}
                told = [await self.load.patiently(http, "/v1/feedback", verdict, retried=(404,)) for _ in range(2)]
                if all(each is not None and each.json()["status"] == "counted" for each in told):
                    self.judged[f"{verdict['id']}-0"] = verdict["reward"]
                await asyncio.sleep(PAUSE_S)

    async def check(self) -> None:
        """Each verdict is one trajectory."""
        redis = connect(self.load.ring.redis.url)
        queue = TrajectoryQueue(redis, POLICY)
        found: Counter[tuple[str, float]] = Counter()

        async def all_there() -> bool:
            found.clear()
            after = ""
            while page := await queue.peek(after, 500):
                for each in page:
                    reward = each.live.trajectory.reward
                    found[each.live.id, -1.0 if reward is None or reward.value is None else reward.value] += 1
                after = page[-1].entry
            return set(self.judged.items()) <= set(found)

        try:
            await wait_until(all_there)
        except AssertionError:
            lost = set(self.judged.items()) - set(found)
            self.load.report.violation(f"{len(lost)} verdicts are lost: {sorted(lost)[:5]}")
        finally:
            await redis.aclose()
        if twice := [each for each, count in found.items() if count > 1]:
            self.load.report.violation(f"verdicts that count twice: {twice[:5]}")
        print(f"sessions: {self.steps} steps, {self.unseen} whose answer was lost; verdicts: {len(self.judged)}")
