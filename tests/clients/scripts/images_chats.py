"""Images as openai (chats, streams, responses), anthropic, langchain-openai and litellm send them: equal answers."""

import base64
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import anthropic
import litellm
import openai
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

FOLDER, URL = Path(os.environ["PARALLM_EYES_DIR"]), os.environ["PARALLM_URL"]
MODEL, MOST = FOLDER.name, 4
RIGHT = 0.8  # share of the answers; the model is right in 0.75 to 1.0 of each kind of question
asked = [json.loads(line) for line in (FOLDER / "examples" / "questions.jsonl").read_text().splitlines()]
pictures = [base64.b64encode((FOLDER / "examples" / each["picture"]).read_bytes()).decode() for each in asked]

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
messages = anthropic.Anthropic(base_url=URL, api_key="none")
chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0, max_tokens=MOST)


def chat_messages(question: str, picture: str) -> list[dict]:
    """As OpenAI's chats have them."""
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    return [{"role": "user", "content": [image, {"type": "text", "text": question}]}]


def by_chat(question: str, picture: str) -> str:
    """Whole."""
    sent = chat_messages(question, picture)
    answer = client.chat.completions.create(model=MODEL, messages=sent, max_tokens=MOST, temperature=0)
    return answer.choices[0].message.content


def by_stream(question: str, picture: str) -> str:
    """Streamed."""
    sent = chat_messages(question, picture)
    parts = client.chat.completions.create(model=MODEL, messages=sent, max_tokens=MOST, temperature=0, stream=True)
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


def by_response(question: str, picture: str) -> str:
    """The responses endpoint."""
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{picture}", "detail": "auto"}
    sent = [{"role": "user", "content": [image, {"type": "input_text", "text": question}]}]
    return client.responses.create(model=MODEL, input=sent, max_output_tokens=16, temperature=0).output_text


def by_message(question: str, picture: str) -> str:
    """Anthropic's messages."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}
    sent = [{"role": "user", "content": [image, {"type": "text", "text": question}]}]
    fixed = {"temperature": 0}  # which the newest models of theirs do not take
    return messages.messages.create(model=MODEL, messages=sent, max_tokens=MOST, extra_body=fixed).content[0].text


def by_langchain(question: str, picture: str) -> str:
    """LangChain's own kind of part, which it translates."""
    image = {"type": "image", "base64": picture, "mime_type": "image/png"}
    return str(chat.invoke([HumanMessage(content=[image, {"type": "text", "text": question}])]).content)


def by_litellm(question: str, picture: str) -> str:
    """Its openai/ route."""
    sent = chat_messages(question, picture)
    target = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
    return litellm.completion(**target, messages=sent, max_tokens=MOST, temperature=0).choices[0].message.content


ways: list[Callable[[str, str], str]] = [by_chat, by_stream, by_response, by_message, by_langchain, by_litellm]
right = 0
for line, picture in zip(asked, pictures, strict=True):
    answers = [way(line["question"], picture).strip() for way in ways]
    assert len(set(answers)) == 1, dict(zip((way.__name__ for way in ways), answers, strict=True))
    right += answers[0] == line["reference"]
assert right >= RIGHT * len(asked), f"{right} of {len(asked)}"
batch = chat.batch(
    [[HumanMessage(content=chat_messages(asked[0]["question"], each)[0]["content"])] for each in pictures]
)
assert len({str(each.content) for each in batch}) > 1, "another picture, another answer"
names = ", ".join(f"{name} {version(name)}" for name in ("openai", "anthropic", "langchain-openai", "litellm"))
print(f"{right} of {len(asked)} right by each of {len(ways)} ways: {names}")
