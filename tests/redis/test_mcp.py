"""The ring as an MCP server, asked by the client of the official SDK over stdio and HTTP."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from typer.testing import CliRunner

from api.cli.main import app
from tests.redis.api_servers import Api, api
from tests.redis.scripted_worker import MODEL, Answer, ScriptedWorker, working
from tests.waiting import wait_until


@pytest.fixture
async def worker(redis_url: str) -> AsyncIterator[ScriptedWorker]:
    async with working(redis_url, lambda spec: Answer("hello")) as playing:
        yield playing


@pytest.fixture
async def server(redis_url: str, worker: ScriptedWorker) -> AsyncIterator[Api]:
    async with api(redis_url) as serving:
        yield serving


def command(server: Api, *arguments: str) -> list[str]:
    return ["-m", "api.cli.main", "mcp", "--url", server.url, *arguments]


async def said(client: Client, tool: str, **arguments: Any) -> Any:
    answer = await client.call_tool(tool, arguments)
    text = answer.content[0].text
    assert not answer.is_error, text
    return json.loads(text)


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    answer = await client.call_tool(tool, arguments)
    assert answer.is_error
    return str(answer.content[0].text)


async def test_an_agent_uses_the_ring_over_stdio_and_reads_refusals_in_its_words(server: Api) -> None:
    async with Client(StdioServerParameters(command=sys.executable, args=command(server))) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"health", "submit_job", "job_results", "adapters", "feedback"} <= tools.keys()
        assert all(tool.description for tool in tools.values())
        assert "prompts" in tools["submit_job"].input_schema["required"]
        assert (await said(client, "models"))[0]["id"] == MODEL
        assert (await said(client, "health"))["workers"][0]["model"] == MODEL
        job = await said(client, "submit_job", prompts=["a", "b"], references=["1", "2"], reward="exact", samples=2)
        assert job["counts"]["total"] == 4
        assert (await said(client, "job_status", job_id=job["id"]))["id"] == job["id"]
        assert [each["id"] for each in await said(client, "jobs")] == [job["id"]]
        assert await said(client, "job_results", job_id=job["id"]) == []
        assert (await said(client, "cancel_job", job_id=job["id"]))["id"] == job["id"]
        assert (await said(client, "adapters"))["data"] == []
        assert "does not exist" in await refused(client, "submit_job", prompts=["a"], model="gone")
        assert "1 to 1000 prompts" in await refused(client, "submit_job", prompts=[])
        assert "2 references for 1" in await refused(client, "submit_job", prompts=["a"], references=["b", "c"])
        assert "nothing" in await refused(client, "job_status", job_id="nothing")
        assert await refused(client, "feedback", answer_id="nothing", rating="up")


async def test_the_same_tools_are_there_over_http(server: Api) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = command(server, "--transport", "http", "--port", str(port))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments)

    async def listens() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    try:
        await wait_until(listens)
        async with Client(f"http://127.0.0.1:{port}/mcp") as client:
            assert (await said(client, "models"))[0]["id"] == MODEL
    finally:
        process.kill()
        await process.wait()


def test_other_machines_do_not_get_the_key_s_rights() -> None:
    answer = CliRunner().invoke(app, ["mcp", "--transport", "http", "--host", "0.0.0.0"])
    assert answer.exit_code == 2 and "only addresses of this machine" in answer.output
