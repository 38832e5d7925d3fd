"""Agents by `base_url`: a program asks, the policy answers, and what the program came to is the reward."""

import asyncio
import json
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.errors import SetupError
from tests.waiting import HANG_S
from trainer.rollouts.agents.endpoint import ChatCall, EpisodeOverError, Feedback, ModelEndpoint
from trainer.rollouts.agents.environment import Agent
from trainer.rollouts.agents.program import AgentError, ProgramEpisode
from trainer.rollouts.agents.runs import AgentRun
from trainer.rollouts.environments import Observation

ASK = """
import json, os, sys, urllib.request
def post(path, body, key=None):
    request = urllib.request.Request(
        os.environ.get("OPENAI_BASE_URL", "") + path if path.startswith("/") else path, json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"])})
    return json.load(urllib.request.urlopen(request))
def ask(messages, **more):
    return post("/chat/completions", {"messages": messages, **more})["choices"][0]["message"]
"""
USER: Any = {"role": "user", "content": "How many nails?"}
TOOL: Any = {"type": "function", "function": {"name": "stock", "parameters": {"type": "object"}}}
CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "stock", "arguments": '{"of": "nails"}'}}
WITH_TOOL = (
    ASK
    + f"""
messages, tools = [{USER}], [{TOOL}]
said = ask(messages, tools=tools)
side = ask([dict(role="user", content="Is that a question?")])["content"]
messages += [said, dict(role="tool", tool_call_id=said["tool_calls"][0]["id"], content="41 " + side)]
last = ask(messages, tools=tools)
post("/feedback", {{"reward": 0.25 + 0.5 * (last["content"] == "41"), "components": {{"asked": 2}}}})
sys.exit(3)
"""
)


def program(folder: Path, text: str) -> list[str]:
    path = folder / "agent.py"
    path.write_text(textwrap.dedent(text))
    return [sys.executable, "-S", str(path)]


def message(**fields: Any) -> str:
    return json.dumps({"role": "assistant", "content": "", **fields})


@pytest.fixture
async def made() -> AsyncIterator[Callable[..., Agent]]:
    """Makes agents, which are closed after the test."""
    agents: list[Agent] = []

    def make(command: Sequence[str], **options: Any) -> Agent:
        agents.append(Agent(command, **options))
        return agents[-1]

    yield make
    for agent in agents:
        await agent.close()


Make = Callable[..., Agent]


async def test_the_example_is_judged_by_its_exit_code(made: Make) -> None:
    agent = made([sys.executable, "-S", "examples/sums_agent.py"])
    observation = await agent.reset(2)
    assert observation.prompt == ({"role": "user", "content": "18+39="},)
    outcomes = await asyncio.gather(*(agent.step(observation, answer) for answer in ("57", "58", "57")))
    assert [(outcome.reward, outcome.done) for outcome in outcomes] == [(1.0, True), (0.0, True), (1.0, True)]


async def test_tools_other_conversations_feedback_and_a_run_played_again(tmp_path: Path, made: Make) -> None:
    """The first conversation is what is learned from; the second process knows nothing of the first one."""
    command = program(tmp_path, WITH_TOOL)
    first, second = (made(command, side_policy="judge") for _ in range(2))
    opening = await first.reset(0)
    assert (opening.prompt, opening.tools) == ((USER,), (TOOL,))
    called = message(tool_calls=[CALL])
    side = await first.step(opening, called)
    question = side.question
    assert question is not None and (question.policy, side.done) == ("judge", False)
    assert question.messages == ({"role": "user", "content": "Is that a question?"},)
    turn = await second.step(replace(opening, info=side.info), "yes")
    result = {"role": "tool", "tool_call_id": "call_1", "content": "41 yes"}
    assert (turn.question, turn.messages) == (None, (result,))
    later = replace(opening, prompt=(USER, json.loads(called), result), info=turn.info)
    ended = await first.step(later, message(content="41"))
    assert (ended.reward, ended.done, ended.components) == (0.75, True, {"asked": 2.0})


TALK = (
    ASK
    + f"""
messages = [{USER}]
said = ask(messages, tools=[{TOOL}])
messages += [said, dict(role="tool", tool_call_id=said["tool_calls"][0]["id"], content="41")]
print("it said", ask(messages, tools=[{TOOL}])["content"])
"""
)


async def test_what_follows_an_answer_is_the_next_turn_and_the_last_word_the_reward(tmp_path: Path, made: Make) -> None:
    agent = made(program(tmp_path, TALK), reward="output", max_calls=2)
    observation = await agent.reset(0)
    assert observation.tools == (TOOL,)
    turn = await agent.step(observation, message(tool_calls=[CALL]))
    tool = {"role": "tool", "tool_call_id": "call_1", "content": "41"}
    assert (turn.reward, turn.done, turn.messages) == (0.0, False, (tool,))
    again = replace(observation, prompt=(*observation.prompt, json.loads(message(tool_calls=[CALL])), tool))  # type: ignore[arg-type]
    ended = await agent.step(replace(again, info=turn.info), message(content="41"))
    assert ended.reward == 41.0 and ended.done
    unread = await agent.step(observation, message(tool_calls=[CALL]))
    with pytest.raises(AgentError, match="no number"):
        await agent.step(replace(again, info=unread.info), message(content="many"))


SERVES = (
    ASK
    + """
for line in sys.stdin:
    episode = json.loads(line)
    if episode["task"] == 13:
        sys.exit("bad luck")
    said = post(episode["base_url"] + "/chat/completions", {"messages": [dict(role="user", content=episode["line"])]},
                episode["api_key"])["choices"][0]["message"]["content"]
    print("for people")
    print(json.dumps({"episode": episode["episode"], "reward": len(said), "components": {}}), flush=True)
"""
)


async def test_one_process_plays_all_episodes_and_another_one_follows_it(tmp_path: Path, made: Make) -> None:
    (tmp_path / "lines.jsonl").write_text('"one"\n"two"\n')
    agent = made(program(tmp_path, SERVES), dataset=str(tmp_path / "lines.jsonl"), serves=True)
    observation = await agent.reset(3)
    assert observation.prompt == ({"role": "user", "content": "two"},)
    assert (await agent.step(observation, "abc")).reward == 3.0
    with pytest.raises(AgentError, match="bad luck"):
        await agent.reset(13)
    assert (await agent.step(await agent.reset(4), "ab")).reward == 2.0


@pytest.fixture
async def endpoint() -> AsyncIterator[tuple[ModelEndpoint, httpx.AsyncClient]]:
    server = ModelEndpoint()
    async with httpx.AsyncClient(base_url=await server.url(), timeout=HANG_S) as client:
        yield server, client
    await server.close()


async def test_the_endpoint_refuses_what_it_cannot_take(endpoint: tuple[ModelEndpoint, httpx.AsyncClient]) -> None:
    server, client = endpoint
    taken: list[ChatCall | Feedback] = []

    def take(said: ChatCall | Feedback) -> None:
        taken.append(said)
        if isinstance(said, ChatCall):
            said.answer.set_exception(EpisodeOverError("the episode has had all its turns"))

    with server.takes("key", take):
        chat, key = "/v1/chat/completions", {"Authorization": "Bearer key"}
        said = [
            await client.post(chat, json={"messages": [USER]}),
            await client.post(chat, json={"messages": [USER], "n": 2}, headers=key),
            await client.post(chat, json={"messages": []}, headers=key),
            await client.post(chat, content=b"{", headers=key),
            await client.post("/v1/completions", json={}, headers=key),
            await client.post("/v1/feedback", json={"reward": "good"}, headers=key),
            await client.post("/key/v1/chat/completions", json={"messages": [USER]}),
        ]
        assert [answer.status_code for answer in said] == [401, 400, 400, 400, 404, 400, 400]
        assert "all its turns" in said[-1].json()["error"]["message"] and len(taken) == 1
        assert (await client.get("/v1/models", headers=key)).json()["data"][0]["id"] == "policy"
    assert (await client.get("/v1/models", headers=key)).status_code == 401


async def test_a_run_that_is_given_up_does_not_leave_its_program_waiting(
    endpoint: tuple[ModelEndpoint, httpx.AsyncClient],
) -> None:
    class Other:
        """Is asked elsewhere, as an episode of a program that serves."""

        async def close(self) -> None: ...

        async def play(self, episode: ProgramEpisode) -> Feedback:
            return await asyncio.get_running_loop().create_future()

    server, client = endpoint
    run = AgentRun(Other(), server, 0, None, 2)
    await run.begin()
    headers = {"Authorization": f"Bearer {run.key}"}
    asking = asyncio.create_task(client.post("/v1/chat/completions", json={"messages": [USER]}, headers=headers))
    assert isinstance(await run.next(), ChatCall)
    await run.end()
    assert (await asking).status_code == 400


async def test_a_streaming_agent_gets_its_message_in_a_stream(
    endpoint: tuple[ModelEndpoint, httpx.AsyncClient],
) -> None:
    server, client = endpoint

    def take(said: ChatCall | Feedback) -> None:
        assert isinstance(said, ChatCall)
        said.answer.set_result({"role": "assistant", "content": "41", "tool_calls": [CALL]})

    with server.takes("key", take):
        answer = await client.post("/key/v1/chat/completions", json={"messages": [USER], "stream": True})
    first, last, end = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    delta = json.loads(first)["choices"][0]["delta"]
    assert (delta["content"], delta["tool_calls"][0]) == ("41", {"index": 0, **CALL})
    assert json.loads(last)["choices"][0]["finish_reason"] == "tool_calls" and end == "[DONE]"


async def test_a_program_that_does_not_ask_or_start_is_an_error_that_says_so(tmp_path: Path, made: Make) -> None:
    with pytest.raises(SetupError, match="without a request to its model"):
        await made(program(tmp_path, "pass")).reset(0)
    with pytest.raises(AgentError, match="does not start"):
        await made(["./no-such-agent"]).reset(0)
    with pytest.raises(SetupError, match="lists of words"):
        Agent("python agent.py")
    changing = made(program(tmp_path, ASK + "ask([dict(role='user', content=str(os.getpid()))])"))
    observation = await changing.reset(0)
    assert isinstance(observation, Observation) and (await changing.step(observation, "x")).reward == 1.0
    with pytest.raises(ValueError, match="not the same each time"):
        await changing.step(observation, "x")
