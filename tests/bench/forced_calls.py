"""Forced calls with varied schemas: how many have arguments that are JSON and follow their schema.

`python -m tests.bench.forced_calls [--model models/tiny] [--calls 100] [--tool-format FORM]` starts a ring with it.
A call that is cut off counts as wrong.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from tests.e2e.rings import ring

NAMES = ("city", "days", "metric", "unit", "tags", "where", "note", "limit", "start", "colour")


def schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of one value, of some kind."""
    kinds = ["enum", "integer", "number", "boolean", "string", "union"] + (["object", "array"] if depth < 2 else [])
    kind = draw.choice(kinds)
    if kind == "enum":
        return {"type": "string", "enum": draw.sample(["red", "green", "blue", "km", "°C"], draw.randint(1, 4))}
    if kind == "union":
        return {"type": [draw.choice(["integer", "boolean"]), "null"]}
    if kind == "string":
        return {"type": "string", "maxLength": draw.choice([4, 12])}
    if kind == "integer":
        return {"type": "integer", "minimum": -9, "maximum": draw.choice([9, 99])}
    if kind == "array":
        return {"type": "array", "items": schema(draw, depth + 1), "maxItems": draw.randint(1, 2)}
    return parameters(draw, depth + 1) if kind == "object" else {"type": kind}


def parameters(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of arguments: an object, of which some members may be missing."""
    names = draw.sample(NAMES, draw.randint(1, 4 if depth == 0 else 2))
    properties = {name: schema(draw, depth) for name in names}
    required = [name for name in names if draw.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


async def call(client: httpx.AsyncClient, model: str, at: int, loose: set[str]) -> str:
    """Ask for one call; what is wrong with it, or "". Texts of forms without quotes are not held to their length."""
    draw = random.Random(at)
    tools = [
        {"type": "function", "function": {"name": f"tool_{at}_{number}", "parameters": parameters(draw)}}
        for number in range(draw.randint(1, 3))
    ]
    named = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
    body = {
        "model": model, "messages": [{"role": "user", "content": f"Use a tool for case {at}."}], "tools": tools,
        "tool_choice": draw.choice(["required", named]), "parallel_tool_calls": draw.random() < 0.5, "seed": at,
        "temperature": 1.0,
    }  # fmt: skip
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return answer.text[:300]
    choice = answer.json()["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    if not calls or choice["finish_reason"] == "length":
        return f"{len(calls)} calls, ended by {choice['finish_reason']}"
    known = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    for each in calls:
        function = each["function"]
        try:
            jsonschema.validate(json.loads(function["arguments"]), known[function["name"]])
        except (ValueError, KeyError, jsonschema.ValidationError) as error:
            return f"{function}: {str(error)[:200]}"
    loose |= set(filter(None, answer.headers.get("x-parallm-unused-parameters", "").split(", ")))
    return ""


async def measure(model: str, calls: int, at_once: int, flags: list[str]) -> int:
    """Ask for all of them; returns how many were wrong."""
    with tempfile.TemporaryDirectory() as folder, ring(Path(folder), *flags, model=Path(model)) as started:
        async with httpx.AsyncClient(base_url=started.url, timeout=None) as client:
            begin, places, loose = time.monotonic(), asyncio.Semaphore(at_once), set[str]()

            async def one(at: int) -> str:
                async with places:
                    return await call(client, Path(model).name, at, loose)

            wrong = [each for each in await asyncio.gather(*map(one, range(calls))) if each]
    print(f"{calls - len(wrong)} of {calls} forced calls are valid, {time.monotonic() - begin:.0f} s")
    for each in wrong:
        print(f"  {each}")
    if loose:
        print(f"  not held to: {len(loose)} parts of schemas")
    return len(wrong)


def main(argv: list[str] | None = None) -> int:
    """1 if a call is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--tool-format", default="", help="other than the model's own")
    args = parser.parse_args(argv)
    flags = ["--default-max-tokens", "4000", *(["--tool-format", args.tool_format] if args.tool_format else [])]
    return int(asyncio.run(measure(args.model, args.calls, args.at_once, flags)) > 0)


if __name__ == "__main__":
    sys.exit(main())
