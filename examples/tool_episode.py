r"""An agent's episode with a tool, over two turns: the model calls the tool, reads its result, and answers.

    mlx_parallm_serve --mode inference_and_training --train-config examples/posted.yaml --model models/tiny --port 8000
    python examples/tool_episode.py --url http://127.0.0.1:8000 --model policy --forced --steps 5

The endpoint and the client are OpenAI's. What is added: a reply also carries the token ids that the worker drew and
their log-probabilities, so an episode that has ended and has its reward is something to learn from. Each question gets
`--group-size` episodes; an episode's advantage is its reward minus the mean of its question.

The tiny model was never shown a tool. `--forced` makes it write a call all the same, by a grammar, and then only the
answer of the second turn is learned. Leave it out for a model that calls tools by itself: both turns are learned then.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "stock",
        "description": "How many are in stock",
        "parameters": {
            "type": "object",
            "properties": {"thing": {"enum": ["nails", "screws", "bolts"]}},
            "required": ["thing"],
            "additionalProperties": False,
        },
    },
}
STOCK = {"nails": 41, "screws": 57, "bolts": 63}


@dataclass
class Episode:
    """One run of the agent."""

    thing: str
    called: str = ""  # the tool's result
    answer: str = ""
    turns: list[dict[str, Any]] = field(default_factory=list)  # what the model has drawn, to learn from

    @property
    def reward(self) -> float:
        """Half a point for looking up the right thing; up to half for an answer that is near what the tool said."""
        right = float(self.called == str(STOCK[self.thing]))
        numbers = self.answer.isdecimal() and self.called.isdecimal()
        near = max(0.0, 1 - abs(int(self.answer) - int(self.called)) / 50) if numbers else 0.0
        return 0.5 * right + 0.5 * near


def main() -> None:
    """Play episodes, and learn from them."""
    parser = argparse.ArgumentParser(description="an agent's episodes with a tool")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="policy", help="the policy of a trainer with `source: posted`")
    parser.add_argument("--forced", action="store_true", help="the first turn has to be a call")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()

    client = OpenAI(base_url=f"{options.url}/v1", api_key=options.api_key)
    for step in range(options.steps):
        things = [thing for thing in STOCK for _ in range(options.group_size)]
        with ThreadPoolExecutor(16) as pool:
            episodes = list(pool.map(lambda thing: play(client, options.model, thing, options.forced), things))
        rewards = [episode.reward for episode in episodes]
        served = learn(options, episodes)
        last = episodes[-1]
        print(f"{last.thing}? tool: {last.called or 'not called'}, answer: {last.answer!r}")
        print(f"step {step}: mean reward {sum(rewards) / len(rewards):.3f}, now {served}", flush=True)


def play(client: OpenAI, model: str, thing: str, forced: bool) -> Episode:
    """Let the model call the tool, give it the result, and let it answer."""
    episode = Episode(thing)
    messages: list[Any] = [{"role": "user", "content": f"How many {thing} do we have?"}]
    message = turn(client, episode, model, messages, "required" if forced else "auto")
    if not message.tool_calls:  # it answered at once: the episode ends after one turn
        episode.answer = message.content or ""
        return episode
    call = message.tool_calls[0]
    episode.called = run_tool(call.function.arguments)
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": episode.called},
    ]
    episode.answer = turn(client, episode, model, messages, "none").content or ""
    return episode


def run_tool(arguments: str) -> str:
    """The tool. A model may write arguments that are broken, and gets to read that."""
    try:
        return str(STOCK[json.loads(arguments)["thing"]])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error!r}"


def turn(client: OpenAI, episode: Episode, model: str, messages: list[Any], choice: Any) -> Any:
    """One reply of the model; what it has drawn freely is noted in the episode."""
    reply = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice=choice, max_tokens=8 if choice == "none" else 96,
        temperature=1.0, logprobs=True, extra_body={"return_token_ids": True},
    )  # fmt: skip
    [drawn] = reply.choices
    if choice != "required" and drawn.logprobs and drawn.logprobs.content:
        episode.turns.append(
            {
                "prompt_ids": reply.model_extra["prompt_token_ids"],
                "completion_ids": drawn.model_extra["token_ids"],
                "logprobs": [token.logprob for token in drawn.logprobs.content],
                "weight_versions": drawn.model_extra.get("weight_versions"),
                "finish_reason": drawn.finish_reason,
            }
        )
    return drawn.message


def learn(options: argparse.Namespace, episodes: list[Episode]) -> str:
    """One train step from all turns of all episodes; returns what is served now.

    Where every question's episodes have one and the same reward, there is nothing to learn, and no step is made.
    """
    trajectories = []
    for thing in STOCK:
        group = [episode for episode in episodes if episode.thing == thing]
        mean = sum(episode.reward for episode in group) / len(group)
        for episode in group:
            trajectories += [{**drawn, "advantage": episode.reward - mean} for drawn in episode.turns]
    tell_apart = [each for each in trajectories if each["advantage"]]
    if not tell_apart:
        return f"{options.model} as before: equal rewards teach nothing"
    body = {"policy": options.model, "trajectories": tell_apart}
    headers = {"Authorization": f"Bearer {options.api_key}"}
    answer = httpx.post(f"{options.url}/v1/training/update", json=body, headers=headers, timeout=120)
    if answer.is_error or answer.json()["status"] == "rejected":  # by the gate, which says why
        raise SystemExit(f"{answer.status_code} {answer.text}")
    return str(answer.json()["lora"])


if __name__ == "__main__":
    main()
