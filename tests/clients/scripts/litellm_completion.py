"""litellm: its openai/ route, streamed and whole, gives one text."""

import os
from importlib.metadata import version

import litellm

TARGET = {
    "model": f"openai/{os.environ['PARALLM_MODEL_NAME']}",
    "api_base": os.environ["PARALLM_URL"] + "/v1",
    "api_key": "none",
    "messages": [{"role": "user", "content": "40+41="}],
    "max_tokens": 8,
    "temperature": 0,
}
whole = litellm.completion(**TARGET)
parts = list(litellm.completion(**TARGET, stream=True))
text = "".join(part.choices[0].delta.content or "" for part in parts)
assert text == whole.choices[0].message.content and text
assert whole.usage.completion_tokens > 0
print(f"litellm {version('litellm')}: {text!r}")
