"""The `ollama` package: chats whole and streamed, calls, formats, thinking, prompts, vectors, models, errors."""

import asyncio
import json
import os

import ollama

MODEL = os.environ["PARALLM_MODEL_NAME"]
HOST = os.environ["PARALLM_URL"].removesuffix("/v1")
client = ollama.Client(host=HOST)
SAY = [{"role": "user", "content": "hello"}]
STEADY = {"temperature": 0, "num_predict": 24}

whole = client.chat(MODEL, SAY, options=STEADY)
parts = list(client.chat(MODEL, SAY, options=STEADY, stream=True))
assert "".join(part.message.content or "" for part in parts) == whole.message.content
assert parts[-1].done and parts[-1].eval_count == whole.eval_count and whole.prompt_eval_count


async def streamed() -> str:
    stream = await ollama.AsyncClient(host=HOST).chat(MODEL, SAY, options=STEADY, stream=True)
    return "".join([part.message.content or "" async for part in stream])


assert asyncio.run(streamed()) == whole.message.content

first = client.generate(MODEL, "hello", options=STEADY)
again = client.generate(MODEL, "and", context=first.context, options=STEADY)
assert again.prompt_eval_count > first.prompt_eval_count
assert client.generate(MODEL, "12+35=", raw=True, options=STEADY).response

schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
answer = client.chat(MODEL, SAY, format=schema, options={**STEADY, "num_predict": 200})
assert json.loads(answer.message.content)["n"] in (1, 2)


def add_two_numbers(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number
        b: The second number
    """
    return a + b


calling = client.chat(MODEL, SAY, tools=[add_two_numbers], options=STEADY)
assert calling.done
history = [
    *SAY,
    {"role": "assistant", "tool_calls": [{"function": {"name": "add_two_numbers", "arguments": {"a": 1, "b": 2}}}]},
    {"role": "tool", "tool_name": "add_two_numbers", "content": "3"},
]
assert client.chat(MODEL, history, tools=[add_two_numbers], think=False, keep_alive="5m", options=STEADY).done

vectors = client.embed(MODEL, ["hello", "good morning"]).embeddings
assert len(vectors) == 2 and abs(sum(x * x for x in vectors[0]) - 1) < 1e-4
assert len(client.embeddings(MODEL, "hello").embedding) == len(vectors[0])

assert MODEL in [model.model for model in client.list().models]
assert MODEL in [model.model for model in client.ps().models]
facts = client.show(MODEL)
assert facts.modelinfo[f"{facts.modelinfo['general.architecture']}.context_length"] > 0
assert "completion" in facts.capabilities
assert client.pull(MODEL).status == "success"

for wrong, status in ((lambda: client.chat("no-such-model", SAY), 404), (lambda: client.delete(MODEL), 404)):
    try:
        wrong()
    except ollama.ResponseError as error:
        assert error.status_code == status and error.error
    else:
        raise AssertionError("refused")
print(f"ollama {__import__('importlib.metadata').metadata.version('ollama')}: all as its package expects")
