"""`mlx_parallm mcp`: the ring as an MCP server, so that agents can submit jobs, look at adapters and give feedback.

Each tool is one or two requests to the HTTP API, with the key that the command was given. An answer is what the API
says, as JSON; a refusal is the tool's error, in the API's words. Over HTTP whoever reaches the port acts with that key,
so it is only opened to this machine.
"""

import itertools
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from ipaddress import ip_address
from typing import Annotated, Any, Literal

import msgspec
import typer

from api.cli.batch_client import BatchClient
from api.cli.client import DEFAULT_URL, JobRequest
from api.cli.console import LOOK_PATIENCE_S, ApiKey, Url, fail, segment
from shared.errors import ParallmError
from shared.jobs import RewardSpec

MOST_PROMPTS = 1000  # of one job from here; more come as a file by `mlx_parallm submit`
MOST_RESULTS = 100
INSTRUCTIONS = (
    "Tools of a ParaLLM ring, which serves language models and trains adapters of them. Jobs sample completions of "
    "many prompts: submit_job gives an id, job_status says when it has ended, job_results has its completions."
)


def mcp(
    transport: Annotated[Literal["stdio", "http"], typer.Option(help="how agents reach the server")] = "stdio",
    host: Annotated[str, typer.Option(help="address for http, which must be of this machine alone")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port for http; the path is /mcp")] = 8765,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Serve the ring's jobs, adapters, feedback and health as tools of the Model Context Protocol."""
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        fail("the MCP server needs the package mcp: pip install 'mlx-parallm[mcp]'", 2)
    from shared.process.settings import version  # loads a server's settings, which few commands need

    server = MCPServer("parallm", instructions=INSTRUCTIONS, version=version(), log_level="WARNING")
    for tool in RingTools(url, api_key).all:
        server.add_tool(_refusing(tool, ToolError))
    if transport == "stdio":
        server.run("stdio")
        return
    if host != "localhost" and not _is_loopback(host):
        fail(
            f"--host {host}: its clients act with your key, so only addresses of this machine are allowed",
            2,
        )
    server.run("streamable-http", host=host, port=port)


Tool = Callable[..., Coroutine[Any, Any, str]]


def _refusing(tool: Tool, error_type: type[Exception]) -> Tool:
    """The tool, whose refusals reach the agent: the SDK shows it the words of its own error alone."""

    @wraps(tool)
    async def call(*given: Any, **named: Any) -> str:
        try:
            return await tool(*given, **named)
        except (ParallmError, ValueError) as error:
            raise error_type(str(error)) from error

    return call


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class RingTools:
    """The tools. Their docstrings and types are what an agent reads of them."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url, self._key = url, api_key

    @property
    def all(self) -> list[Tool]:
        """The tools in the order in which an agent needs them."""
        return [
            self.health, self.models, self.submit_job, self.jobs, self.job_status, self.job_results, self.cancel_job,
            self.adapters, self.adapter, self.roll_back_adapter, self.feedback, self.training_status,
        ]  # fmt: skip

    async def health(self) -> str:
        """The ring's state: workers with their models and memory, queues, trainers, and what is wrong, if anything."""
        async with self._client() as client:
            return _shown(await client.health())

    async def models(self) -> str:
        """Models and adapters that a request may name, with the length of their context in tokens."""
        async with self._client() as client:
            return _shown(await client.models())

    async def submit_job(
        self,
        prompts: list[str],
        model: str = "",
        samples: int = 1,
        max_tokens: int = 256,
        temperature: float = 1.0,
        reward: str = "",
        references: list[str] | None = None,
        adapter: str = "",
        idempotency_key: str = "",
    ) -> str:
        """Start a job: completions of up to 1000 prompts, scored if a reward is named (exact, math, ...).

        `references` has one right answer for each prompt, for rewards that compare. Returns the job with its id. With
        an `idempotency_key`, submitting again returns the same job.
        """
        if not 0 < len(prompts) <= MOST_PROMPTS:
            raise ValueError(f"1 to {MOST_PROMPTS} prompts; a file of more goes by `mlx_parallm submit`")
        if references is not None and len(references) != len(prompts):
            raise ValueError(f"{len(references)} references for {len(prompts)} prompts")
        pairs = itertools.zip_longest(prompts, references or ())
        lines = [{"prompt": prompt, **({"reference": right} if right is not None else {})} for prompt, right in pairs]
        async with self._client() as client:
            request = JobRequest(
                kind="rollout" if reward else "generate",
                model=model or await client.only_model(),
                n=samples,
                max_tokens=max_tokens,
                temperature=temperature,
                reward=RewardSpec(reward) if reward else None,
                adapter=adapter,
                idempotency_key=idempotency_key,
            )
            return _shown(await client.submit(request, lines))

    async def jobs(self, limit: int = 20) -> str:
        """The newest jobs with their progress."""
        async with self._client() as client:
            return _shown(await client.jobs(max(1, min(limit, 100))))

    async def job_status(self, job_id: str) -> str:
        """One job: its status, how many samples are done, the mean reward so far."""
        async with self._client() as client:
            return _shown(await client.status(job_id))

    async def job_results(self, job_id: str, after: int = -1, limit: int = 20) -> str:
        """Results of a job in their order, also while it runs: text, reward and tokens' count of each sample.

        `after` is the index of the last result that was read; -1 begins at the first.
        """
        found: list[dict[str, Any]] = []
        async with self._client() as client:
            results = client.results(job_id, after)
            async for each in results:
                shown: dict[str, Any] = {
                    "index": after + 1 + len(found),
                    "prompt_index": each.prompt_index,
                    "text": each.text,
                }
                shown |= {"reward": None if each.reward is None else each.reward.value}
                shown |= {"tokens": len(each.completion_ids), "finish_reason": each.finish_reason}
                found.append(shown)
                if len(found) >= max(1, min(limit, MOST_RESULTS)):
                    break
            await results.aclose()
        return _shown(found)

    async def cancel_job(self, job_id: str) -> str:
        """Cancel a job. Results that are there stay."""
        async with self._client() as client:
            return _shown(await client.cancel(job_id))

    async def adapters(self) -> str:
        """Adapters (LoRA) with their latest and best versions."""
        return await self._get("/v1/adapters")

    async def adapter(self, name: str) -> str:
        """One adapter with all its versions and their metrics."""
        return await self._get(f"/v1/adapters/{segment(name)}")

    async def roll_back_adapter(self, name: str, version: int) -> str:
        """Make an earlier version of an adapter the latest: requests that name it without a version get that one."""
        async with self._client() as client:
            path = f"/v1/adapters/{segment(name)}/rollback"
            return _shown(await client.call("POST", path, dict[str, Any], {"version": version}))

    async def feedback(
        self, answer_id: str, reward: float | None = None, rating: Literal["up", "down"] | None = None, text: str = ""
    ) -> str:
        """Judge an answer of this server by its id: a reward, a rating or a remark. Policies learn from it."""
        given = {"id": answer_id, "reward": reward, "rating": rating, "text": text or None}
        body = {name: value for name, value in given.items() if value is not None}
        async with self._client() as client:
            return _shown(await client.call("POST", "/v1/feedback", dict[str, Any], body))

    async def training_status(self, policy: str = "policy") -> str:
        """How the training of a policy goes: steps, rewards, the version that is served, alerts."""
        return await self._get("/v1/training/status", policy=policy)

    async def _get(self, path: str, **params: Any) -> str:
        async with self._client() as client:
            return _shown(await client.call("GET", path, dict[str, Any], **params))

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[BatchClient]:
        async with BatchClient(self._url, api_key=self._key, patience_s=LOOK_PATIENCE_S) as client:
            yield client


def _shown(value: Any) -> str:
    return json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
