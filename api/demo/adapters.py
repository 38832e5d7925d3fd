"""The act with adapters: two of them and the base decode in one batch, and a new version is loaded under way.

Streams on the base, on a pinned version and on a name that follows the latest version run together, and meanwhile a
version is published. The act prints what the clients saw: the gaps between tokens before and during the load, and the
time from the publish to the first token of the new version. No stream may break, and pinned ones must keep their
version. Streams go on until all followers have moved, however busy the machine is.

The clients run on the machine of the ring: while this program waits for a core, it sees a gap that no stream had. So it
measures itself, too, and reports both.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from safetensors.numpy import save

from api.demo.serving import MODEL

STREAMS = 4  # of each kind
MOST_TOKENS = 1_800  # of a stream that is not closed
RANK = 8
LAYERS = 3
LOOK_S = 0.005
SHAPES = {"self_attn.q_proj": (128, 128), "self_attn.v_proj": (128, 64), "mlp.down_proj": (384, 128)}  # models/tiny


class LoopStops:
    """When this program's own event loop was late, and by how many seconds."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []

    async def watch(self) -> None:
        """Measures how late the event loop is, until it is cancelled."""
        while True:
            due = time.monotonic() + LOOK_S
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            self._late.append((now, now - due))

    def longest(self, start: float, end: float) -> float:
        """The longest one that ended between two times."""
        return max((late for at, late in self._late if start <= at <= end), default=0.0)


@dataclass
class SeenStream:
    """One stream, as its client saw it; monotonic seconds."""

    model: str
    arrivals: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)  # of each arrival
    tokens: int = 0
    ended_by_us: bool = False
    under_way: asyncio.Event = field(default_factory=asyncio.Event)
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # to the new version

    @property
    def whole(self) -> bool:
        """True if the stream reached its bound or this program closed it."""
        return self.ended_by_us or self.tokens == MOST_TOKENS

    def take(self, span: dict[str, Any]) -> None:
        """Notes the arrival of new tokens and their version."""
        self.arrivals.append(time.monotonic())
        self.versions.append(span["version"])
        self.tokens += span["end"] - span["start"]
        if len(self.arrivals) > 20:
            self.under_way.set()
        if span["version"] == "bold@2":
            self.moved.set()

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between neighbouring arrivals of which the later one lies between two times."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [later - earlier for earlier, later in pairs if start <= later <= end]

    def first(self, version: str) -> float:
        """When the first token of a version came."""
        return next((at for at, seen in zip(self.arrivals, self.versions, strict=True) if seen == version), 0.0)


class AdapterAct:
    """The demo's part about adapter versions, on a ring that runs."""

    def __init__(
        self,
        url: str,
        console: Console,
        *,
        model: str = MODEL,
        shapes: dict[str, tuple[int, int]] = SHAPES,
        layers: int = LAYERS,
        streams: int = STREAMS,
    ) -> None:
        """`shapes`: inputs and outputs of what the adapters adapt in each of the model's `layers`."""
        self._url = url
        self._console = console
        self._model, self._shapes, self._layers, self._streams = model, shapes, layers, streams
        self._over = asyncio.Event()
        self._stops = LoopStops()

    async def run(self) -> bool:
        """True if no stream broke and each one had tokens of the versions that it asked for."""
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as http:
            watching = asyncio.create_task(self._stops.watch())
            calm = await self._upload(http, "calm", self._weights(1))
            first = await self._upload(http, "bold", self._weights(2))
            seen = [SeenStream(model) for _ in range(self._streams) for model in (self._model, calm, "bold")]
            streams = [asyncio.create_task(self._stream(http, stream)) for stream in seen]
            await asyncio.gather(*(stream.under_way.wait() for stream in seen))
            weights = self._weights(3)
            published = time.monotonic()
            second = await self._upload(http, "bold", weights)
            answered = time.monotonic()
            await asyncio.gather(*(stream.moved.wait() for stream in seen if stream.model == "bold"))
            self._over.set()
            await asyncio.gather(*streams)
            watching.cancel()
        return self._report(seen, (first, second), published, answered)

    async def _upload(self, http: httpx.AsyncClient, name: str, weights: bytes) -> str:
        """The version that it has become, as NAME@VERSION."""
        files = {
            "adapter": ("adapters.safetensors", weights),
            "config": ("adapter_config.json", json.dumps(self._config()).encode()),
        }
        answer = (await http.post("/upload_adapter", data={"name": name}, files=files)).raise_for_status()
        return f"{name}@{answer.json()['policy_version']}"

    async def _stream(self, http: httpx.AsyncClient, seen: SeenStream) -> None:
        try:
            await self._read(http, seen)
        finally:  # no client waits for a stream that has ended
            seen.under_way.set()
            seen.moved.set()

    async def _read(self, http: httpx.AsyncClient, seen: SeenStream) -> None:
        body: dict[str, Any] = {
            "model": seen.model,
            "messages": [{"role": "user", "content": "Count from 3 to 9."}],
            "max_tokens": MOST_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "adapter_policy": "follow",
            "return_weight_versions": True,
        }
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return
                for span in chunk["choices"][0].get("weight_versions", []):
                    seen.take(span)
                if self._over.is_set():
                    seen.ended_by_us = True
                    return

    def _report(self, seen: list[SeenStream], bold: tuple[str, str], published: float, answered: float) -> bool:
        before_it, new = bold
        following = [stream for stream in seen if stream.model == "bold"]
        switched = [stream.first(new) for stream in following]
        end = max([answered, *switched])
        began = min((stream.arrivals[0] for stream in seen if stream.arrivals), default=published)
        before = [gap for stream in seen for gap in stream.gaps(began, published)]
        during = [gap for stream in seen for gap in stream.gaps(published, end)]
        whole = all(stream.whole for stream in seen)
        others = [stream for stream in seen if stream not in following]
        kept = all(set(stream.versions) == {"" if stream.model == self._model else stream.model} for stream in others)
        moved = all(switched) and all(stream.versions[0] == before_it for stream in following)
        self._console.print(
            f"  {len(seen)} streams on {', '.join(sorted({stream.model for stream in others}))} and bold in one batch; "
            f"{new} published under way: "
            f"first token of it after {1000 * (max(switched) - published):.0f} ms\n"
            f"  gap between tokens, as clients see it: median {1000 * median(before):.1f} ms before, "
            f"{1000 * median(during):.1f} ms during the load; longest {1000 * max(before):.1f} ms before, "
            f"{1000 * max(during):.1f} ms during: a pause of "
            f"{1000 * max(0.0, max(during) - max(before)):.1f} ms\n"
            f"  this program, which measures, has itself waited for a core or been busy for at most "
            f"{1000 * self._stops.longest(began, published):.1f} ms before and "
            f"{1000 * self._stops.longest(published, end):.1f} ms during\n"
            f"  no stream broke: {whole}; pinned ones and the base did not move: {kept}; followers moved: {moved}"
        )
        return whole and kept and moved

    def _config(self) -> dict[str, Any]:
        scaled = {"rank": RANK, "scale": 2.0, "dropout": 0.0}
        return {"fine_tune_type": "lora", "num_layers": self._layers, "lora_parameters": scaled}

    def _weights(self, seed: int) -> bytes:
        """A random LoRA of the model."""
        draw = np.random.default_rng(seed)
        tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
        for layer in range(self._layers):
            for path, (inputs, outputs) in self._shapes.items():
                module = f"model.layers.{layer}.{path}"
                tensors[f"{module}.lora_a"] = (0.1 * draw.standard_normal((inputs, RANK))).astype(np.float32)
                tensors[f"{module}.lora_b"] = (0.1 * draw.standard_normal((RANK, outputs))).astype(np.float32)
        return save(tensors)
