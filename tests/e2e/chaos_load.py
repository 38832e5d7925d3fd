"""What clients do while processes die, and what they hold against what they see.

Every prompt's greedy answer is known from before, when nothing was harmed, and nothing shared its batch. A stream must
show exactly that, token by token, through any number of resumptions; a sample of a job must be a beginning of it.
"""

import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from api.cli.client import InferenceClient, JobRequest
from api.cli.http import RequestFailedError
from api.generation.resume import GRACE_S
from shared.jobs import JobInput, JobStatus
from shared.redis import keys
from shared.redis.connection.client import connect
from shared.redis.tokens.log import events_of_chunk
from shared.trajectories import Trajectory
from tests.e2e.chaos_ring import ChaosRing, Member
from tests.e2e.rings import MODEL
from tests.waiting import HANG_S

PROMPTS = [f"Tell me about the number {n}." for n in (3, 17, 29, 44, 58, 63, 71, 86)]
LONG_PROMPTS = [f"{'All numbers are even or odd. ' * 20}Tell me about the number {n}." for n in (5, 8, 13, 21)]
LONGEST = 320
BUSY = (408, 429, 503, 504)  # to be asked again
GIVEN_UP = "while it ran alone"  # a sequence whose workers have died again and again
EXCUSED = ("shutting down", "Redis cannot")  # errors after which a client comes again


@dataclass
class Report:
    """What happened."""

    violations: list[str] = field(default_factory=list)
    streams: int = 0
    tokens: int = 0
    resumed: int = 0
    begun_again: int = 0  # their api died before it had said a word
    left: int = 0
    jobs: dict[str, str] = field(default_factory=dict)  # id -> terminal state
    samples: int = 0
    given_up: int = 0
    takeovers_s: list[float] = field(default_factory=list)
    redis_restarts_s: list[float] = field(default_factory=list)
    held: list[str] = field(default_factory=list)  # by processes: lines of a table
    grown: list[str] = field(default_factory=list)  # processes whose memory grew
    learned: int = 0  # learners
    seen: int = 0  # answers about images
    denied: int = 0  # looks at another tenant's things, each a 404
    owned: int = 0  # looks at a tenant's own things, each as it was

    def violation(self, text: str) -> None:
        self.violations.append(text)
        print(f"VIOLATION: {text}", flush=True)


class Answers:
    """The greedy answer to each prompt."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}

    async def learn(self, url: str, prompts: Sequence[str], key: str = "") -> None:
        async with httpx.AsyncClient(base_url=url, timeout=HANG_S, headers=bearer(key)) as http:
            for prompt in prompts:
                until = time.monotonic() + HANG_S
                while (answer := await http.post("/v1/completions", json=body(prompt, LONGEST))).status_code == 503:
                    assert time.monotonic() < until, answer.text  # a busy machine says 503 now and then
                    await asyncio.sleep(0.2)
                assert answer.status_code == 200, answer.text
                self.tokens[prompt] = answer.json()["choices"][0]["token_ids"]
                assert len(self.tokens[prompt]) == LONGEST


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def body(prompt: str, max_tokens: int) -> dict[str, Any]:
    greedy = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, **greedy}


class Stream:
    """One streamed request, from its first try to its last token, over any number of connections."""

    def __init__(self, load: "Load", expected: list[int]) -> None:
        self.load = load
        self.report = load.report
        self.expected = expected
        self.tokens: list[int] = []
        self.times: list[float] = []  # when each token came
        self.id = self.last_event_id = ""
        self.api = ""  # the name of the one that is read from
        self.done = False
        self.error = ""

    @property
    def sequence(self) -> str:
        return f"{self.id}-0"

    async def run(self, prompt: str, http: httpx.AsyncClient) -> None:
        request = body(prompt, len(self.expected)) | {"stream": True, "stream_options": {"include_event_ids": True}}
        progress_at, had = time.monotonic(), 0
        while not self.done and not self.error:
            with contextlib.suppress(httpx.HTTPError):
                await self._read(self._open(http, request))
            if len(self.tokens) > had:
                progress_at, had = time.monotonic(), len(self.tokens)
            if time.monotonic() - progress_at > HANG_S:
                stored = await self.load.stored(self.sequence)
                self.error = (
                    f"nothing came for {time.monotonic() - progress_at:.0f} s after {had} tokens; in Redis: {stored}"
                )
            if not self.done:
                await asyncio.sleep(0.1)
        self._judge()

    def _open(self, http: httpx.AsyncClient, request: dict[str, Any]) -> Any:
        api = self.load.some_api(but=self.api)
        self.api, url = api.name, api.url
        if not self.id:
            return http.stream("POST", f"{url}/v1/completions", json=request)
        self.report.resumed += 1
        return http.stream("GET", f"{url}/v1/streams/{self.id}", headers={"Last-Event-ID": self.last_event_id})

    async def _read(self, opened: Any) -> None:
        async with opened as response:
            if response.status_code in (429, 503):
                return
            if response.status_code != 200:
                self.error = f"status {response.status_code}: {(await response.aread()).decode()[:300]}"
                return
            event_id = ""
            async for line in response.aiter_lines():
                if line.startswith("id:"):
                    event_id = line[3:].strip()
                elif line == "data: [DONE]":
                    self.done = len(self.tokens) >= len(self.expected) or bool(self.error)
                elif line.startswith("data: "):
                    self._take(json.loads(line[6:]), event_id)

    def _take(self, chunk: dict[str, Any], event_id: str) -> None:
        if "error" in chunk:
            if not any(text in chunk["error"]["message"] for text in EXCUSED):
                self.error = str(chunk["error"])
            return
        self.id, self.last_event_id = chunk["id"], event_id
        for choice in chunk["choices"]:
            self.tokens += choice.get("token_ids") or []
            self.times += [time.monotonic()] * (len(self.tokens) - len(self.times))

    def _judge(self) -> None:
        self.report.streams += 1
        self.report.tokens += len(self.tokens)
        if GIVEN_UP in self.error:
            self.report.given_up += 1
        elif self.error:
            self.report.violation(f"stream {self.id or '(unnamed)'}: {self.error}")
        if self.tokens != self.expected[: len(self.tokens)] or (not self.error and self.tokens != self.expected):
            at = next((i for i, (a, b) in enumerate(zip(self.tokens, self.expected, strict=False)) if a != b), -1)
            self.report.violation(
                f"stream {self.id}: {len(self.tokens)} of {len(self.expected)} tokens, first other one at {at}"
            )


class Load:
    """Streams and jobs until told to stop."""

    def __init__(self, ring: ChaosRing, rng: random.Random, report: Report, answers: Answers) -> None:
        self.ring = ring
        self.rng = rng
        self.report = report
        self.answers = answers
        self.stopping = False
        self.open: set[Stream] = set()

    def some_api(self, but: str = "") -> Member:
        """A client cannot know which one is well; it goes elsewhere where the last one has let it down."""
        return self.rng.choice([api for api in self.ring.of("api") if api.name != but])

    def api_url(self) -> str:
        return self.some_api().url

    def client(self, timeout: httpx.Timeout, key: str | None = None) -> httpx.AsyncClient:
        """By default with the key of clients that belong to no tenant."""
        headers = bearer(self.ring.key if key is None else key)
        return httpx.AsyncClient(timeout=timeout, trust_env=False, headers=headers)

    async def patiently(
        self,
        http: httpx.AsyncClient,
        path: str,
        asked: dict[str, Any] | None,
        *,
        retried: tuple[int, ...] = (),
        told: str = "",
    ) -> httpx.Response | None:
        """What some api says in the end; None when the work was given up, or the load is to stop.

        `asked`: posted; None gets the path. `retried`: what may be so for a moment: the answer is not kept yet, an
        earlier try is still under way. `told`: a pattern of refusals (status and text) that are an answer.
        """
        until = time.monotonic() + HANG_S
        while not self.stopping:
            try:
                url = f"{self.api_url()}{path}"
                answer = await (http.get(url) if asked is None else http.post(url, json=asked))
            except httpx.HTTPError:
                await asyncio.sleep(0.1)
                continue
            if answer.status_code == 200 or (told and re.search(told, f"{answer.status_code} {answer.text}")):
                return answer
            if GIVEN_UP in answer.text:
                self.report.given_up += 1
                return None
            if answer.status_code not in (*BUSY, *retried) or time.monotonic() > until:
                self.report.violation(f"{path} {str(asked)[:300]}: {answer.status_code} {answer.text[:300]}")
                return None
            await asyncio.sleep(0.1)
        return None

    async def stored(self, seq: str) -> str:
        """What Redis holds of a sequence, for a message."""
        redis = connect(self.ring.redis.url)
        try:
            fields = await redis.hgetall(keys.sequence(MODEL, seq))
            fields.pop(b"spec", None)
            chunks = await redis.xrange(keys.sequence_log(MODEL, seq))
            events = [event for _, chunk in chunks for event in events_of_chunk(chunk, seq)]
            return f"{fields} log {[(event.attempt, event.position, event.end, event.finish) for event in events]}"
        finally:
            await redis.aclose()

    async def streams(self) -> None:
        rng = self.rng
        # It asks elsewhere well before an api gives up waiting for it (api/generation/resume.py).
        timeout = httpx.Timeout(GRACE_S / 3, connect=2)
        async with self.client(timeout) as http:
            while not self.stopping:
                prompt = rng.choice(list(self.answers.tokens))
                stream = Stream(self, self.answers.tokens[prompt][: rng.randint(40, LONGEST)])
                self.open.add(stream)
                try:
                    await stream.run(prompt, http)
                finally:
                    self.open.discard(stream)

    async def leavers(self) -> None:
        """Clients that go away in the middle; their rows must not stay."""
        rng = self.rng
        async with self.client(httpx.Timeout(5, connect=2)) as http:
            while not self.stopping:
                request = body(rng.choice(PROMPTS), LONGEST) | {"stream": True}
                with contextlib.suppress(httpx.HTTPError):
                    async with http.stream("POST", f"{self.api_url()}/v1/completions", json=request) as response:
                        async for _ in response.aiter_lines():
                            if rng.random() < 0.1:
                                self.report.left += 1
                                break
                await asyncio.sleep(1.0)

    async def jobs(self) -> None:
        rng = self.rng
        while not self.stopping:
            prompts = rng.sample(list(self.answers.tokens), 6)
            request = JobRequest(
                kind="generate", model=MODEL, n=3, max_tokens=rng.randint(24, 120), temperature=0, ignore_eos=True
            )
            cancelled = rng.random() < 0.2
            submitted = await self.asking(lambda c, r=request, p=prompts: c.submit(r, [JobInput(text) for text in p]))
            if cancelled:
                await asyncio.sleep(rng.uniform(0.1, 2.0))
                await self.asking(lambda c, id=submitted.id: c.cancel(id))
            await self.follow(submitted.id, prompts, request, cancelled)

    async def asking(self, ask: Any, key: str | None = None) -> Any:
        """Ask any api until one answers."""
        until, key = time.monotonic() + HANG_S, self.ring.key if key is None else key
        while True:
            try:
                async with InferenceClient(self.api_url(), api_key=key, timeout_s=15, patience_s=5) as client:
                    return await ask(client)
            except RequestFailedError as error:
                if error.http_status in (400, 404, 409, 500) or time.monotonic() > until:
                    self.report.violation(f"a request failed: {error.http_status} {error.message}")
                    raise

    async def follow(
        self, job_id: str, prompts: list[str], request: JobRequest, cancelled: bool = False, key: str | None = None
    ) -> None:
        """Wait for a job's end, and judge its samples."""
        ended: JobStatus = await self.asking(lambda c: c.wait(job_id, timeout_s=HANG_S), key)
        lines: list[Trajectory] = await self.asking(lambda c: collected(c.results(job_id)), key)
        self.report.jobs[job_id] = ended.status
        self.report.samples += len(lines)
        places = [(line.prompt_index, line.sample_index) for line in lines]
        all_places = [(p, s) for p in range(len(prompts)) for s in range(request.n)]
        if ended.status != "succeeded" and not (cancelled and ended.status == "cancelled"):
            self.report.violation(f"job {job_id} is {ended.status}: {ended.error}")
        if len(set(places)) < len(places) or (ended.status == "succeeded" and places != all_places):
            self.report.violation(f"job {job_id}: samples {places}")
        for line in lines:
            self._judge(job_id, line, prompts[line.prompt_index], request.max_tokens or 0)

    def _judge(self, job_id: str, line: Trajectory, prompt: str, wanted: int) -> None:
        got = list(line.completion_ids)
        if line.finish_reason == "error" and GIVEN_UP in line.error:
            self.report.given_up += 1
        elif line.finish_reason not in ("length", "cancelled"):
            self.report.violation(f"job {job_id}: a sample ended with {line.finish_reason}: {line.error}")
        elif line.finish_reason == "length" and len(got) != wanted:
            self.report.violation(f"job {job_id}: {len(got)} tokens instead of {wanted}")
        if got != self.answers.tokens[prompt][: len(got)] or len(line.logprobs) != len(got):
            self.report.violation(f"job {job_id}: another answer than the one to {prompt!r} alone")

    async def reads_from(self, api: Member, within_s: float = 20.0) -> None:
        """Before an api is killed: wait until a stream has more to come from there than lies on its way."""
        until = time.monotonic() + within_s
        while time.monotonic() < until and not self.stopping:
            if any(s.api == api.name and 0 < len(s.tokens) < len(s.expected) - LONGEST // 2 for s in self.open):
                return
            await asyncio.sleep(0.01)

    async def watch_takeovers(self, victim: Member, workers_of: Any) -> None:
        """Before a worker is killed: how long its streams will pause, unless something else disturbs them, too."""
        owners = await workers_of([stream.sequence for stream in self.open if stream.tokens])
        began = time.monotonic()
        for stream in [s for s in self.open if s.tokens and owners.get(s.sequence) == victim.name]:
            task = asyncio.create_task(self._measure(stream, victim, began))
            _measuring.add(task)
            task.add_done_callback(_measuring.discard)

    async def _measure(self, stream: Stream, victim: Member, began: float) -> None:
        api = stream.api
        while not stream.done and not stream.error:
            later = [at for at in stream.times if at > began + 0.2]
            if later:
                if not self.ring.disturbed(victim.name, {api, stream.api}, began, later[0]):
                    self.report.takeovers_s.append(later[0] - began)
                return
            await asyncio.sleep(0.02)


_measuring: set["asyncio.Task[None]"] = set()


async def collected(lines: AsyncIterator[Trajectory]) -> list[Trajectory]:
    return [line async for line in lines]
