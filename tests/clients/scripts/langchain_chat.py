"""langchain-openai: ChatOpenAI invokes, streams and batches."""

import os
from importlib.metadata import version

from langchain_openai import ChatOpenAI

chat = ChatOpenAI(
    model=os.environ["PARALLM_MODEL_NAME"],
    base_url=os.environ["PARALLM_URL"] + "/v1",
    api_key="none",
    temperature=0,
    max_tokens=8,
)
whole = chat.invoke("12+35=")
assert whole.content == "".join(str(part.content) for part in chat.stream("12+35="))
assert whole.usage_metadata["output_tokens"] > 0
answers = chat.batch(["12+35=", "40+41=", "11+11="])
assert answers[0].content == whole.content and len(answers) == 3
print(f"langchain-openai {version('langchain-openai')}: {whole.content!r}")
