"""An agent with the tools of an MCP server, for `trainer.rollouts.agents.environment:Agent`.

Run by a Python with the packages `mcp` and `openai`: `python mcp_program.py COMMAND WORDS...`, where the words start a
server that talks over its standard streams, such as `python -m mcp_server_time`. A task's line is `{"prompt",
"reference"}`, and `"system"` where it has one. The agent offers the server's tools, carries out each call, and ends
with the first answer without calls: the last word on standard output is 1 if the answer contains the reference, else 0
(`"reward": "output"`). Imports nothing of ParaLLM.
"""

import asyncio
import json
import os
import sys
from typing import Any

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from openai import AsyncOpenAI


async def called(session: Any, call: Any) -> str:
    """The text of a tool's result, or the error of the call."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
        result = await session.call_tool(call.function.name, arguments)
    except Exception as error:  # of the server, or of what the model wrote: the model is told
        return f"error: {error}"
    return "".join(getattr(part, "text", "") for part in result.content)


async def main() -> None:
    line = json.loads(os.environ["PARALLM_TASK_JSON"])
    client = AsyncOpenAI(timeout=None, max_retries=0)  # by OPENAI_BASE_URL and OPENAI_API_KEY
    server = StdioServerParameters(command=sys.argv[1], args=sys.argv[2:])
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        tools: list[Any] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", {}),
                },
            }
            for tool in (await session.list_tools()).tools
        ]
        messages: list[Any] = [{"role": "system", "content": line["system"]}] if line.get("system") else []
        messages.append({"role": "user", "content": line["prompt"]})
        while True:
            reply = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": await called(session, call)})
    print(int(str(line["reference"]) in (message.content or "")))


if __name__ == "__main__":
    asyncio.run(main())
