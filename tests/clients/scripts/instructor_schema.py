"""instructor: a pydantic model comes back through response_format json_schema, from a model that knows no JSON."""

import os
from importlib.metadata import version
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

client = instructor.from_openai(
    openai.OpenAI(base_url=os.environ["PARALLM_URL"] + "/v1", api_key="none"), mode=instructor.Mode.JSON_SCHEMA
)


class Sum(BaseModel):
    """What is asked for; without more fields, or a model that knows no JSON adds some until `max_tokens`."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["sum", "difference"]
    exact: bool


answer = client.chat.completions.create(
    model=os.environ["PARALLM_MODEL_NAME"],
    messages=[{"role": "user", "content": "12+35="}],
    response_model=Sum,
    max_tokens=200,
    temperature=0,
    max_retries=0,
)
assert isinstance(answer, Sum)
print(f"instructor {version('instructor')}: {answer!r}")
