"""The openai package: chat, completions, embeddings; streamed and whole, n, logprobs, seeds, errors as its classes."""

import os

import openai

MODEL = os.environ["PARALLM_MODEL_NAME"]
client = openai.OpenAI(base_url=os.environ["PARALLM_URL"] + "/v1", api_key="none", max_retries=0)
QUESTION = [{"role": "user", "content": "12+35="}]


def chat() -> None:
    whole = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=8, temperature=0)
    parts = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    text, usage = "", None
    for part in parts:
        text += "".join(choice.delta.content or "" for choice in part.choices)
        usage = part.usage or usage
    assert text == whole.choices[0].message.content
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens


def completions() -> None:
    reply = client.completions.create(
        model=MODEL, prompt="12+35=", max_tokens=4, n=3, seed=5, temperature=1, logprobs=2
    )
    again = client.completions.create(
        model=MODEL, prompt="12+35=", max_tokens=4, n=3, seed=5, temperature=1, logprobs=2
    )
    assert [c.text for c in reply.choices] == [c.text for c in again.choices]
    assert all(len(c.logprobs.tokens) == len(c.logprobs.token_logprobs) for c in reply.choices)


def embeddings() -> None:
    reply = client.embeddings.create(model=MODEL, input=["12+35=", "hello"])
    assert len(reply.data) == 2 and len(reply.data[0].embedding) > 8


def errors() -> None:
    for wrong, kind in (
        ({"model": "nobody"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
    ):
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **wrong})
        except kind as error:
            assert error.body["message"]
        else:
            raise AssertionError(f"{wrong} was taken")


for part in (chat, completions, embeddings, errors):
    part()
print(f"openai {openai.__version__}: chat, completions, embeddings, errors")
