"""Turns of coding agents: `python -m tests.bench.agent_turns [--kind dense hybrid] [--agent claude codex opencode]`.

The requests are those that the agents themselves have sent (`python -m tests.clients.agents --record FOLDER`), each in
two sessions in two folders; words and numbers are replaced by others of their length, the same ones for the same, so
that what stays and what changes from turn to turn is theirs and no text is. `--scrub FOLDER ...` writes that file anew
from such folders.

They are sent to a ring, each for one token, so an answer's time is that to the first token. Printed are each turn's
time over the first one's and the share of its prompt that came from the prefix cache; the first turn of another session
of the same agent; a request for a summary and the first turn after it; and the bytes that several sessions add.
"""

import argparse
import contextlib
import copy
import hashlib
import json
import lzma
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.bench.models import QWEN3, SPECIAL, random_folder
from tests.e2e.rings import Ring, ring
from tests.waiting import HANG_S

RECORDED = Path(__file__).with_suffix(".json.xz")
AIM = 0.15
SESSIONS = 4  # that begin alike
SETTLED_S = 6.0
CONTEXT = 65_536
VOCAB = 4096
WIDTH = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": VOCAB}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {**QWEN3, **WIDTH, **HEADS, "num_hidden_layers": 2},
    "hybrid": {
        "model_type": "qwen3_5", "vocab_size": VOCAB, "tie_word_embeddings": True, "eos_token_id": 2,
        "text_config": {
            "model_type": "qwen3_5", "num_hidden_layers": 4, "full_attention_interval": 2, "num_experts": 0,
            "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
            "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
            "rope_parameters": {"type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}, **WIDTH, **HEADS,
        },
    },
}  # fmt: skip
# The client's instructions stand before its tools, as in Qwen3's template, or after them, as in Qwen3.5's.
_TOOLS = r"""{%- if tools %}{{- '\n\n# Tools\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\nCall one with <tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>\n\n' }}
{%- endif %}"""
_SYSTEM = "{{- system }}"
_CHAT = r"""{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if system or tools %}{{- '<|im_start|>system\n' }}BEGINNING{{- '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for tool_call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
TEMPLATES = {
    "dense": _CHAT.replace("BEGINNING", _SYSTEM + _TOOLS),
    "hybrid": _CHAT.replace("BEGINNING", _TOOLS + _SYSTEM),
}

Body = dict[str, Any]
Session = list[tuple[str, Body]]  # path and body of each request

# -- what the agents have sent

_TEXTS = {"text", "content", "description", "instructions", "output", "arguments", "thinking"}
_LEFT_OUT = ("client_metadata", "metadata", "prompt_cache_key")
_BILLING = "x-anthropic-billing-header:"
_WORD = re.compile(r"[A-Za-z]+|[0-9]+")


def scrubbed(value: Any, *, is_text: bool = False) -> Any:
    """A part of a body with other words in its texts; names, types and schemas stay."""
    if isinstance(value, str):
        return _WORD.sub(_other, value) if is_text and not value.startswith(_BILLING) else value
    if isinstance(value, list):
        return [scrubbed(each, is_text=is_text) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "custom":
        value = {**value, "format": {"type": "text"}}  # a grammar would not be one any more
    return {
        key: scrubbed(each, is_text=is_text or _says(key, each)) for key, each in value.items() if key not in _LEFT_OUT
    }


def _says(key: str, value: Any) -> bool:
    """True for texts, and for the arguments of a call."""
    return isinstance(value, dict) if key == "input" else isinstance(value, str) and key in _TEXTS


def _other(found: re.Match[str]) -> str:
    word = found.group()
    digest = hashlib.blake2b(word.encode(), digest_size=16).digest()
    if word.isdigit():
        return "".join(str(byte % 10) for byte in digest)[: len(word)].replace("0", "1")
    return "".join(_SYLLABLES[byte % len(_SYLLABLES)] for byte in digest)[: len(word)]


_SYLLABLES = ("ba", "ce", "di", "fo", "gu", "la", "me", "ni", "or", "pu", "ra", "se", "ti", "on", "an", "er")


def recorded(folder: Path) -> Session:
    """The requests of one session, without those that are no turn of its conversation, such as one for a title."""
    sent = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    longest = max(len(json.dumps(each["body"])) for each in sent)
    turns = [each for each in sent if len(json.dumps(each["body"])) > longest / 2]
    return [(each["path"].partition("?")[0], scrubbed(each["body"])) for each in turns]


def scrub(folders: Sequence[Path]) -> None:
    """Write `RECORDED` from folders with a folder an agent each."""
    agents: dict[str, list[Session]] = {}
    for folder in folders:
        for each in sorted(folder.iterdir()):
            agents.setdefault(each.name, []).append(recorded(each))
    RECORDED.write_bytes(lzma.compress(json.dumps(agents, ensure_ascii=False).encode(), preset=9))
    print(f"{RECORDED}: {RECORDED.stat().st_size} bytes, {', '.join(agents)}")


def sessions() -> dict[str, list[Session]]:
    """The recorded sessions of each agent."""
    return json.loads(lzma.decompress(RECORDED.read_bytes()))


def texts(value: Any) -> Iterator[str]:
    """All texts in a body, for a tokenizer to be trained on."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts(each)


# -- what is asked


class Turn(NamedTuple):
    """How one request was answered."""

    first_s: float
    prompt: int
    cached: int

    def shown(self, first: "Turn") -> str:
        times, share = self.first_s / first.first_s, self.cached / self.prompt
        computed = (self.prompt - self.cached) / (first.prompt - first.cached)
        told = f"{times:6.3f} of turn 1 ({1e3 * self.first_s:7,.0f} ms)"
        return f"{told}, computed {computed:.3f} of it, cached {share:4.0%} of {self.prompt:,}"


class Client:
    """Sends requests for one token each."""

    def __init__(self, served: Ring) -> None:
        self._http = httpx.Client(base_url=served.url, timeout=HANG_S)

    def close(self) -> None:
        self._http.close()

    def ask(self, path: str, body: Body) -> Turn:
        body = {**body, "stream": False}
        for name in ("model", "stream_options"):
            body.pop(name, None)
        body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = 1
        began = time.perf_counter()
        answer = self._http.post(path, json=body)
        first_s = time.perf_counter() - began
        assert answer.status_code == 200, answer.text[:500]
        return Turn(first_s, *_tokens(answer.json()["usage"]))

    def kv_bytes(self) -> float:
        """Bytes of the worker's prefix cache."""
        time.sleep(SETTLED_S)  # a worker says it with its heartbeat
        lines = self._http.get("/metrics").text.splitlines()
        name = "mlx_parallm_prefix_cache_bytes"
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def _tokens(usage: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt, and those from the cache."""
    if "cache_read_input_tokens" in usage:
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return usage.get("prompt_tokens", usage.get("input_tokens")), details.get("cached_tokens") or 0


def said(path: str, body: Body) -> list[Any]:
    """The conversation of a body."""
    return body["input" if path == "/v1/responses" else "messages"]


def ends_with(path: str, body: Body, text: str) -> Body:
    """A body whose last turn is the user's, and says this."""
    made = copy.deepcopy(body)
    said(path, made).append({"role": "user", "content": text})
    return made


def anew(path: str, opening: Body, text: str) -> Body:
    """The session's first request with this in the place of its task: what follows a summary, or another task."""
    made = copy.deepcopy(opening)
    task = next(each for each in reversed(said(path, made)) if each.get("role") == "user")
    content = task["content"]
    task["content"] = text if isinstance(content, str) else [*content[:-1], {**content[-1], "text": text}]
    return made


SUMMARY = "Write down what was asked, what was done and what is left, for one who sees nothing else. " * 4


def measure(client: Client, agent: str, of_agent: list[Session]) -> float:
    """One agent's sessions; the largest time of a later turn over the first one's."""
    (path, opening), *_ = turns = of_agent[0]
    first, *later = [client.ask(*turn) for turn in turns]
    print(f"{agent}: turn 1 has {first.prompt:,} tokens, {first.cached:,} of them cached", flush=True)
    for number, turn in enumerate(later, 2):
        print(f"  turn {number:<22} {turn.shown(first)}", flush=True)
    for other in of_agent[1:]:
        for number, turn in enumerate(map(client.ask, *zip(*other, strict=True)), 1):
            print(f"  another session, turn {number:<5} {turn.shown(first)}", flush=True)
    print(f"  a summary is asked for      {client.ask(path, ends_with(*turns[-1], SUMMARY)).shown(first)}", flush=True)
    print(f"  the turn after it           {client.ask(path, anew(path, opening, SUMMARY)).shown(first)}", flush=True)
    before = client.kv_bytes()
    tasks = [client.ask(path, anew(path, opening, f"Task {at}. {SUMMARY}")) for at in range(SESSIONS)]
    added = (client.kv_bytes() - before) / SESSIONS
    print(f"  {SESSIONS} other tasks, the slowest    {max(tasks).shown(first)}", flush=True)
    print(f"  each adds {added / 1e6:.2f} MB to the cache's {before / 1e6:.1f} MB", flush=True)
    return max(turn.first_s / first.first_s for turn in later)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--agent", nargs="+", help="default: all that were recorded")
    parser.add_argument("--scrub", nargs="+", type=Path, metavar="FOLDER", help="write the recorded sessions anew")
    args = parser.parse_args()
    if args.scrub:
        scrub(args.scrub)
        return
    known = sessions()
    words = [*SPECIAL, *texts([known[agent] for agent in sorted(known)])]
    for kind in args.kind:
        with tempfile.TemporaryDirectory() as at:
            model = random_folder(Path(at, kind), KINDS[kind], template=TEMPLATES[kind], text=words)
            flags = ("--max-request-bytes", "16000000")
            with ring(Path(at, "data"), *flags, model=model) as served, contextlib.closing(Client(served)) as client:
                client.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": SUMMARY}]})
                print(f"{kind}:", flush=True)
                for agent in args.agent or known:
                    worst = measure(client, agent, known[agent])
                    print(f"  later turns at most {worst:.3f} of turn 1; aim: at most {AIM}", flush=True)


if __name__ == "__main__":
    main()
