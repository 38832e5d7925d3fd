"""`make real`: a small real model in our own life: chat, tools, schemas, embeddings, a job, adapters, learning.

    python -m api.demo.real --model real-out/SmolLM2-135M-Instruct --out real-out

Every token goes the way that a user's would. What was seen is printed, and written to `real.json`.
"""

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from openai import AsyncOpenAI
from rich.console import Console

from api.cli.client import InferenceClient, JobRequest
from api.demo.adapters import AdapterAct
from api.demo.serving import DemoRing, ring
from shared.gguf.conversion import Conversion
from shared.jobs import JobInput
from shared.process.model_aliases import short_name

FRANCE = "What is the capital of France?"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "the weather in a city", "parameters": CITY}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "job": {"enum": ["cook", "pilot", "nurse"]},
    },
    "required": ["name", "age", "job"],
    "additionalProperties": False,
}
SENTENCES = ("A cat sleeps on the sofa.", "A kitten naps on a couch.", "The stock market fell sharply today.")
COUNTRIES = ("France", "Italy", "Spain", "Japan", "Egypt", "Brazil", "Kenya", "Norway")
QUESTIONS = ("What is the capital of {}?", "Name a food from {}.", "In which continent is {}?", "Say hello to {}.")
TAUGHT = ("Mara", "Otto", "Lina", "Hugo", "Vera", "Emil", "Nora", "Karl", "Ruth", "Paul", "Ines", "Kurt")
HELD_OUT = ("Rosa", "Theo", "Anna", "Jens", "Lara", "Omar", "Elsa", "Finn")
NAMES = (*TAUGHT, *HELD_OUT)
COPY = 'Answer with JSON only, like {"name": "Bela"}.'
PROMPTS, NEW_TOKENS = 64, 24
PATIENCE_S = 3600  # with a machine that does much else


class City(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments that a call of `get_weather` must have."""

    city: str


class Person(msgspec.Struct, forbid_unknown_fields=True):
    """An answer that the schema PERSON allows."""

    name: str
    age: Annotated[int, msgspec.Meta(ge=0, le=120)]
    job: Literal["cook", "pilot", "nurse"]


@dataclass
class Seen:
    """Figures that the acts have measured, by name."""

    figures: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def check(self, what: str, holds: bool) -> None:
        """Note what does not hold."""
        if not holds:
            self.failed.append(what)


class RealModel:
    """The acts, on a ring that serves the model."""

    def __init__(self, served: DemoRing, model: Path, out: Path, console: Console, steps: int, seed: int) -> None:
        self._served, self._file, self._out, self._console = served, model, out, console
        self._steps, self._seed = steps, seed
        self._model = short_name(str(model))
        self.seen = Seen()

    async def run(self) -> None:
        """One act after the other."""
        openai = AsyncOpenAI(base_url=f"{self._served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        async with openai, InferenceClient(self._served.url) as client:
            await self._chat(openai)
            await self._stream(openai)
            await self._call(openai)
            await self._json(openai)
            await self._embed(openai)
            await self._job(client)
            await self._adapters()
            if self._steps:
                await self._learn(openai)

    def _show(self, act: str, words: str, **figures: Any) -> None:
        self.seen.figures[act] = figures
        shown = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
        )
        self._console.print(f"  [bold]{act}[/] {words}", markup=True)
        self._console.print(f"    {shown}", markup=False, soft_wrap=True)

    async def _chat(self, openai: AsyncOpenAI) -> None:
        began = time.monotonic()
        text = await self._said(openai, self._model, [{"role": "user", "content": FRANCE}], NEW_TOKENS)
        self.seen.check("the answer names Paris", "Paris" in text)
        self._show("chat", FRANCE, answer=text.strip(), seconds=time.monotonic() - began)

    async def _stream(self, openai: AsyncOpenAI) -> None:
        began = time.monotonic()
        messages: Any = [{"role": "user", "content": "Tell me a short story about a fox."}]
        stream = await openai.chat.completions.create(
            model=self._model, messages=messages, temperature=0, max_tokens=48, stream=True
        )
        at = [time.monotonic() async for chunk in stream if chunk.choices and chunk.choices[0].delta.content]
        per_s = (len(at) - 1) / (at[-1] - at[0]) if len(at) > 1 else 0.0
        self.seen.check("a stream has tokens", len(at) > 10)
        self._show("stream", "one story", first_token_s=at[0] - began, chunks=len(at), tokens_per_s=per_s)

    async def _call(self, openai: AsyncOpenAI) -> None:
        tools: Any = [{"type": "function", "function": WEATHER}]
        answer = await openai.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": "How is the weather in Rome?"}],
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=128,
        )
        calls = answer.choices[0].message.tool_calls or []
        arguments = "".join(call.function.arguments for call in calls if call.type == "function")
        self.seen.check("a forced call is valid", _is_valid(arguments, City))
        self._show("tool, forced", "get_weather", arguments=" ".join(arguments.split()))

    async def _json(self, openai: AsyncOpenAI) -> None:
        answer = await openai.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": "Describe Mara, a cook of 41 years, as JSON."}],
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
            temperature=0,
            max_tokens=64,
        )
        text = answer.choices[0].message.content or ""
        self.seen.check("an answer follows its schema", _is_valid(text, Person))
        self._show("JSON schema", "a person", answer=" ".join(text.split()))

    async def _embed(self, openai: AsyncOpenAI) -> None:
        answer = await openai.embeddings.create(model=self._model, input=list(SENTENCES), encoding_format="float")
        cat, kitten, market = (each.embedding for each in answer.data)
        near, far = _cosine(cat, kitten), _cosine(cat, market)
        self.seen.check("sentences of one meaning are nearer", near > far)
        self._show("embeddings", "cat, kitten, market", width=len(cat), cat_kitten=near, cat_market=far)

    async def _job(self, client: InferenceClient) -> None:
        asked = [question.format(country) for country in COUNTRIES for question in QUESTIONS] * 2
        inputs = [JobInput([{"role": "user", "content": text}]) for text in asked[:PROMPTS]]
        began = time.monotonic()
        request = JobRequest(kind="generate", model=self._model, max_tokens=NEW_TOKENS, temperature=0.7, seed=1)
        status = await client.wait((await client.submit(request, inputs)).id)
        took, tokens = time.monotonic() - began, status.usage.completion_tokens
        self.seen.check("a job ends whole", status.status == "succeeded")
        done = f"{status.counts.succeeded} of {status.counts.total}"
        self._show("job", f"{PROMPTS} prompts", done=done, tokens=tokens, seconds=took, tokens_per_s=tokens / took)

    async def _adapters(self) -> None:
        config = _config(self._file)
        hidden, heads = config["hidden_size"], config["head_dim"]
        shapes = {
            "self_attn.q_proj": (hidden, config["num_attention_heads"] * heads),
            "self_attn.v_proj": (hidden, config["num_key_value_heads"] * heads),
            "mlp.down_proj": (config["intermediate_size"], hidden),
        }
        self._console.print("  [bold]adapters[/] two and the base in one batch, and a version loaded under way")
        layers = config["num_hidden_layers"]
        act = AdapterAct(self._served.url, self._console, model=self._model, shapes=shapes, layers=layers, streams=1)
        whole = await act.run()
        self.seen.figures["adapters"] = {"whole": whole}
        self.seen.check("adapters share a batch and are swapped", whole)

    async def _learn(self, openai: AsyncOpenAI) -> None:
        """Show it answers, then let it learn from rewards, and count what it gets right that it has not seen."""
        shown, tasks = self._out / "shown.jsonl", self._out / "tasks.jsonl"
        asked = {name: {"role": "user", "content": f"{name} is a cook. What is the name? {COPY}"} for name in NAMES}
        answers = {name: json.dumps({"name": name}) for name in NAMES}
        said = {name: {"role": "assistant", "content": answers[name]} for name in TAUGHT}
        _write(shown, [{"messages": [asked[name], said[name]]} for name in TAUGHT])
        _write(tasks, [{"prompt": [asked[name]], "reference": answers[name]} for name in TAUGHT])

        async def right(model: str) -> int:
            """Held-out names that a model copies, in the form that was asked for."""
            texts = [await self._said(openai, model, [asked[name]], 12) for name in HELD_OUT]
            return sum(text.strip() == answers[name] for text, name in zip(texts, HELD_OUT, strict=True))

        base = await right(self._model)
        common = ["--steps", str(self._steps), "--lora-rank", "8", "--seed", str(self._seed), "--warmup-steps", "1"]
        sft = ["--mode", "sft", "--adapter", "shown", "--dataset", str(shown), "--held-out-dataset", str(shown)]
        sft += ["--prompts-per-step", "8", "--learning-rate", "0.0003", *common]
        steps, took = await asyncio.to_thread(self._train, "shown", sft)
        version = f"shown@{steps[-1]['version']}" if steps else self._model
        losses = [round(step["loss"], 3) for step in steps]
        taught = await right(version)
        self._show(
            "SFT",
            f"{self._steps} steps",
            losses=losses,
            seconds=took,
            held_out=f"{base} -> {taught} of {len(HELD_OUT)}",
        )
        form = {"name": "regex", "options": {"pattern": r'^\{"name": "\w+"\}$', "full": True}, "weight": 0.4}
        reward = json.dumps({"parts": [form, {"name": "exact", "weight": 0.6}]})
        rl = ["--task", "jsonl", "--dataset", str(tasks), "--reward", "weighted", "--reward-options", reward]
        rl += ["--start-from", version, "--prompts-per-step", "4", "--group-size", "4", "--max-tokens", "12"]
        rl += [
            "--learning-rate",
            "0.0001",
            "--no-mask-overlong",
            "--distances-every",
            "3",
            "--group-deadline-s",
            str(PATIENCE_S),
            *common,
        ]
        steps, took = await asyncio.to_thread(self._train, "policy", rl)
        rewards = [round(step["reward"], 3) for step in steps]
        measured = [step["mismatch"] for step in steps if step["mismatch"] is not None]
        mismatch = max(measured) if measured else "not measured"
        after = await right("policy") if steps else taught
        held_out = f"{taught} -> {after} of {len(HELD_OUT)}"
        self._show("GRPO", f"{self._steps} steps", rewards=rewards, seconds=took, mismatch=mismatch, held_out=held_out)

    def _train(self, name: str, flags: list[str]) -> tuple[list[dict[str, Any]], float]:
        """Run a trainer to its end: the lines of its metrics, and the seconds."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="parallm-real-") as run_dir:
            command = [sys.executable, "-m", "trainer", "--connect-to", self._served.redis_url, "--run-dir", run_dir]
            command += ["--model", str(self._file), "--log-json", "true", *flags]
            with (self._out / f"{name}.log").open("w") as log:
                done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
            metrics = next(Path(run_dir).rglob("metrics.jsonl"), None)
            lines = [] if metrics is None else [json.loads(line) for line in metrics.read_text().splitlines()]
        steps = [line for line in lines if line["loss"] is not None]  # a run on data begins with a line before it
        self.seen.check(f"the trainer of {name} ends well", done.returncode == 0 and len(steps) == self._steps)
        return steps, time.monotonic() - began

    async def _said(self, openai: AsyncOpenAI, model: str, messages: Any, most: int) -> str:
        answer = await openai.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=most)
        return answer.choices[0].message.content or ""


def main() -> int:
    """Run the acts; 0 when each of them saw what it should."""
    parser = argparse.ArgumentParser(prog="python -m api.demo.real", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder or a GGUF file")
    parser.add_argument("--out", type=Path, default=Path("real-out"))
    parser.add_argument("--steps", type=int, default=10, help="of SFT, then of GRPO; 0 leaves them out")
    parser.add_argument("--seed", type=int, default=1, help="of both")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(f"starting the ring with {arguments.model}")
    patient = ["--request-timeout-s", str(PATIENCE_S), "--first-token-timeout-s", str(PATIENCE_S)]
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="parallm-demo-") as data_dir,
        ring(Path(data_dir), arguments.out / "serve.log", 1, console, *patient, model=str(arguments.model)) as served,
    ):
        acts = RealModel(served, arguments.model, arguments.out, console, arguments.steps, arguments.seed)
        acts.seen.figures["ready"] = {"seconds": time.monotonic() - began}
        asyncio.run(acts.run())
    (arguments.out / "real.json").write_text(json.dumps(acts.seen.figures, indent=2) + "\n")
    for what in acts.seen.failed:
        console.print(f"  [red]not seen: {what}[/]")
    console.print(f"  written to {arguments.out}/real.json")
    return 1 if acts.seen.failed else 0


def _write(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _config(model: Path) -> dict[str, Any]:
    """The config.json of a folder, or the one that a GGUF file would get."""
    if model.is_file():
        return Conversion(model).config
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def _is_valid(text: str, kind: type[msgspec.Struct]) -> bool:
    try:
        msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError:
        return False
    return True


def _cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)


if __name__ == "__main__":
    sys.exit(main())
