"""What tenants own while processes die: each sees all of its own things as they were, and nothing of the other's."""

import asyncio
import itertools

import httpx

from api.cli.client import JobRequest
from shared.jobs import JobInput
from tests.e2e.chaos_load import PROMPTS, Load
from tests.e2e.chaos_ring import KEYS
from tests.e2e.rings import MODEL

TENANTS = ("acme", "bolt")
PAUSE_S = 0.5  # between two things that are made
KEPT = 4  # things of each tenant that are looked at


class Tenants:
    """Makes jobs and stored responses with the keys of two tenants, and looks at them with both."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._responses: dict[str, list[tuple[str, str]]] = {name: [] for name in TENANTS}  # ids and texts

    async def run(self) -> None:
        """Until the load is told to stop."""
        timeout = httpx.Timeout(20, connect=2)
        own, other = (self._load.client(timeout, KEYS[name]) for name in TENANTS)
        async with own, other:
            for number in itertools.count():
                if self._load.stopping:
                    return
                owner, by_owner, stranger = (
                    (TENANTS[0], own, other) if number % 2 else (TENANTS[1], other, own)
                )  # fmt: skip
                await self._make_response(owner, by_owner, PROMPTS[number % len(PROMPTS)])
                for id, text in self._responses[owner][-KEPT:]:
                    await self._look(by_owner, stranger, f"/v1/responses/{id}", text)
                if number % 5 == 0:
                    await self._make_job(owner, by_owner, stranger, PROMPTS[number % len(PROMPTS)])
                await asyncio.sleep(PAUSE_S)

    async def _make_response(self, owner: str, by_owner: httpx.AsyncClient, prompt: str) -> None:
        asked = {"model": MODEL, "input": prompt, "max_output_tokens": 16, "temperature": 0, "store": True}
        answer = await self._load.patiently(by_owner, "/v1/responses", asked)
        if answer is not None:
            said = answer.json()
            self._responses[owner].append((said["id"], str(said["output"])))

    async def _make_job(
        self, owner: str, by_owner: httpx.AsyncClient, stranger: httpx.AsyncClient, prompt: str
    ) -> None:
        request = JobRequest(kind="generate", model=MODEL, n=2, max_tokens=24, temperature=0, ignore_eos=True)
        job = await self._load.asking(lambda client: client.submit(request, [JobInput(prompt)]), KEYS[owner])
        await self._look(by_owner, stranger, f"/v1/jobs/{job.id}", job.id)
        await self._load.follow(job.id, [prompt], request, key=KEYS[owner])
        await self._look(by_owner, stranger, f"/v1/jobs/{job.id}", job.id)

    async def _look(self, by_owner: httpx.AsyncClient, stranger: httpx.AsyncClient, path: str, holds: str) -> None:
        """The owner finds what it made, the other tenant a 404."""
        report = self._load.report
        seen = await self._load.patiently(by_owner, path, None)
        if seen is not None:
            text = str(seen.json()["output"]) if "output" in seen.json() else seen.text
            if holds not in text:
                report.violation(f"{path} is not what its tenant made: {text[:300]} in place of {holds[:300]}")
            report.owned += 1
        denied = await self._load.patiently(stranger, path, None, told="^404 ")
        if denied is not None:
            if denied.status_code != 404:
                report.violation(f"{path} is shown to another tenant: {denied.text[:300]}")
            report.denied += 1
