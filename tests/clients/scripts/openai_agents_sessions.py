"""The openai-agents package over /v1/responses: sessions in its own store and in /v1/conversations, turns that follow
by `previous_response_id` or in a `conversation_id`, streams, and a tool."""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

MODEL = os.environ["PARALLM_MODEL_NAME"]
FIRST, SECOND = "12+35=", "23+45="
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["PARALLM_URL"] + "/v1", api_key="none", max_retries=0)
settings = ModelSettings(max_tokens=100, temperature=0)
agent = Agent(name="sums", model=OpenAIResponsesModel(model=MODEL, openai_client=client), model_settings=settings)


def asked(result: object) -> int:
    """Tokens of the prompt of the last call."""
    return result.raw_responses[-1].usage.input_tokens  # type: ignore[attr-defined]


async def grows(**how: object) -> int:
    """Two turns, of which the second is asked behind the first; tokens of its prompt."""
    first = await Runner.run(agent, FIRST, **how)  # type: ignore[arg-type]
    second = await Runner.run(agent, SECOND, **how)  # type: ignore[arg-type]
    assert asked(second) > asked(first) + 8, "the first turn was not there"
    return asked(second)


async def sessions() -> set[int]:
    with tempfile.TemporaryDirectory() as folder:
        own = SQLiteSession("s", Path(folder) / "sessions.db")
        sizes = {await grows(session=own)}
        own.close()
    session = OpenAIConversationsSession(openai_client=client)
    sizes.add(await grows(session=session))
    items = await session.get_items()
    assert [item["role"] for item in items] == ["user", "assistant"] * 2, items
    assert (await session.pop_item())["role"] == "assistant"
    assert len(await session.get_items(limit=2)) == 2
    await session.clear_session()
    conversation = await client.conversations.create()
    sizes.add(await grows(conversation_id=conversation.id))
    return sizes


async def followed() -> int:
    first = await Runner.run(agent, FIRST)
    second = Runner.run_streamed(agent, SECOND, previous_response_id=first.last_response_id)
    kinds = [event.data.type async for event in second.stream_events() if event.type == "raw_response_event"]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed", kinds
    return asked(second)


async def tool() -> None:
    calls: list[str] = []

    @function_tool
    def note(color: Literal["red", "blue"]) -> str:
        """Note a color."""
        calls.append(color)
        return "noted"

    forced = ModelSettings(max_tokens=120, temperature=0, tool_choice="required", parallel_tool_calls=False)
    caller = agent.clone(tools=[note], model_settings=forced, tool_use_behavior="stop_on_first_tool")
    session = OpenAIConversationsSession(openai_client=client)
    await Runner.run(caller, "note red", session=session)
    assert calls and set(calls) <= {"red", "blue"}, calls
    kinds = [item.get("type", "message") for item in await session.get_items()]
    assert kinds.count("function_call") == kinds.count("function_call_output") == len(calls), kinds


async def main() -> None:
    sizes = await sessions() | {await followed()}
    assert len(sizes) == 1, f"the same turns, and prompts of different lengths: {sizes}"
    await tool()
    print("openai-agents: sessions of its own and of ours, turns that follow, a stream, a tool")


asyncio.run(main())
