"""The api process's hands in a ring: Redis, the models that workers serve, the frames that come back.

A process has one ring of its own, where its keys, limits, files, batches and responses are, and may serve the models of
others (`--ring`): `Ring.others`. Which of them a request is about is decided in `choosing.py`.
"""

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass
from typing import Annotated

import structlog
from fastapi import Depends, Request
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from api.callers.caller import asker
from api.checks.body_readers import BodyReaders
from api.checks.grammars import GrammarChecker
from api.checks.image_fetch import ImageFetch
from api.checks.image_intake import ImageIntake
from api.load import ProcessLoad
from api.ring.cold_models import Obstacle, obstacle, waiting_for
from api.ring.first_tokens import FirstTokens, Forecast
from api.ring.ordered_scores import OrderedScores
from api.ring.split_choices import SplitChoices
from api.ring.spreading import Crowd, Sent
from shared.catalogue import EMPTY, RingModels
from shared.errors import InvalidRequestError, PausedError, ServiceUnavailableError, UnknownModelError
from shared.process.api_settings import ApiSettings
from shared.process.other_rings import HOME, named_urls
from shared.redis.adapters.splits import Splits
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import connect
from shared.redis.connection.faults import reason
from shared.redis.files.batch_store import BatchStore
from shared.redis.files.file_store import FileStore
from shared.redis.jobs.store import JobStore
from shared.redis.kept.answer_store import AnswerStore
from shared.redis.kept.conversation_store import ConversationStore
from shared.redis.kept.episode_store import EpisodeStore
from shared.redis.kept.kept_things import Terms
from shared.redis.kept.response_store import ResponseStore
from shared.redis.kept.session_store import SessionStore
from shared.redis.processes.catalogue import CatalogueStore
from shared.redis.processes.metric_store import MetricWriter
from shared.redis.processes.pause import PauseSwitch
from shared.redis.processes.worker_registry import WorkerRegistry, WorkerStatus, weights_of
from shared.redis.queue.affinity import Affinity
from shared.redis.queue.dead_letters import DeadLetters
from shared.redis.queue.sequence_queue import CLASSES, SequenceQueue
from shared.redis.tokens.reader import FrameReader
from shared.redis.training.learner_store import LearnerStore
from shared.redis.training.tinker_store import TinkerStore
from shared.scoring.pool import RewardPool
from shared.scoring.score import SampleScorer
from shared.scoring.served import ServedRewards
from shared.sequences import ModelCard, SequenceClass
from shared.telemetry.metrics import Tally
from shared.text.codec import CodecCache, TextCodec

log = structlog.get_logger()

IMAGE_GRACE_S = 600  # that images stay after the last deadline of a sequence that names them
LOOK_AGAIN_S = 1.0  # how old the view of live models may be
WATCH_S = 1.0  # between two looks whether a ring answers, where there are several
ANSWER_S = 2.0  # for which it may be silent
GIVEN_UP_S = 15.0  # after which the requests of another ring end that is away
MAX_SCORE_S = 60.0  # that a job runner may take over texts to be scored at once
REMOVED_S = 5.0  # without its entry, after which a model counts as removed: a Redis may have lost the catalogue
FORGET_REMOVED_S = 600.0
SERVING = frozenset({"ready", "paused"})  # states of workers that have taken, or will take, what waits


@dataclass(frozen=True)
class ServedModel:
    """A model with at least one live worker, and what is needed to use it."""

    card: ModelCard
    codec: TextCodec
    queue: SequenceQueue

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: changes when weights or tokenizer do."""
        return f"fp_{self.card.base_sha256[:10]}{self.card.tokenizer_sha256[:6]}"


class Ring:
    """Everything that outlives a request in this process."""

    def __init__(
        self, settings: ApiSettings, tally: Tally | None = None, *, name: str = HOME, home: "Ring | None" = None
    ) -> None:
        self.settings = settings
        self.name = name
        self.tally = tally or Tally()
        self.api_id = settings.api_id or f"{socket.gethostname().split('.')[0]}-{uuid.uuid4().hex[:8]}"
        self.shutting_down = False
        self.home: Ring = home or self
        self.load: ProcessLoad = home.load if home else ProcessLoad(settings.max_concurrent_requests, self.tally)
        self.first_tokens = FirstTokens()
        self.redis: Redis = connect(settings.redis)
        self.registry = WorkerRegistry(self.redis, shares=True)
        self.catalogue = CatalogueStore(self.redis)
        self.models: RingModels = EMPTY  # of the catalogue, and the hosts, as of the last look
        self._removed: dict[str, float] = {}  # monotonic, since when models are no longer in it
        self.affinity = Affinity(self.redis, self.registry)
        self.codecs = CodecCache(self.registry)
        self.grammars: GrammarChecker = home.grammars if home else GrammarChecker()
        self.bodies: BodyReaders = home.bodies if home else BodyReaders()
        self.jobs = JobStore(self.redis)
        self.files: FileStore = home.files if home else FileStore(self.redis)
        self.batches: BatchStore = home.batches if home else BatchStore(self.redis)
        terms = Terms(settings.response_ttl_s, settings.response_store_mb << 20)
        self.responses: ResponseStore = home.responses if home else ResponseStore(self.redis, terms)
        kept = Terms(settings.feedback_ttl_s, settings.feedback_store_mb << 20)
        self.answers, self.episodes = AnswerStore(self.redis, kept), EpisodeStore(self.redis, kept)
        self.conversations: ConversationStore = home.conversations if home else ConversationStore(self.redis, terms)
        longest_s = int(max(settings.request_timeout_s, settings.background_timeout_s))
        self.images = ImageIntake(self.redis, Terms(longest_s + IMAGE_GRACE_S, settings.image_store_mb << 20))
        self.image_fetch: ImageFetch = home.image_fetch if home else _image_fetch(settings)
        self.sessions = SessionStore(self.redis, Terms(settings.session_ttl_s, settings.session_store_mb << 20))
        self.dead_letters = DeadLetters(self.redis)
        self.learners = LearnerStore(self.redis)
        self.tinker = TinkerStore(self.redis)
        self.adapters = AdapterStore(self.redis, keep_n=settings.adapter_keep_n, who_asks=asker)
        self.splits = SplitChoices(Splits(self.redis, self.adapters), self.tally)
        self.frames = FrameReader(settings.redis, self.api_id)
        self.counts = MetricWriter(self.redis, self.tally, "api", self.api_id)
        # It compiles the patterns of rewards, and scores nothing.
        self.patterns: RewardPool = home.patterns if home else RewardPool(processes=1)
        self.judges = ServedRewards(self.redis, f"reward-{self.api_id}", asker)
        self.rewards = SampleScorer(
            OrderedScores(self.redis, min(MAX_SCORE_S, settings.request_timeout_s)), self.judges
        )
        self.away = "it has not answered yet" if home else ""  # why it is taken for away, where there are several
        self._tasks: list[asyncio.Task[None]] = []
        self._queues: dict[str, SequenceQueue] = {}
        self._live: dict[str, ModelCard] = {}
        self._workers: dict[str, list[WorkerStatus]] = {}
        self._forecasts: dict[tuple[str, SequenceClass], Forecast | None] = {}
        self._waiting: dict[str, int] = {}  # interactive, of models that several rings serve
        self.sent = Sent()
        self._looked = float("-inf")
        self._looking = asyncio.Lock()
        self._joined = asyncio.Event()
        self.others: tuple[Ring, ...] = ()
        if home is None:
            self.others = tuple(self._other(name, url) for name, url in named_urls(settings.ring))

    def _other(self, name: str, url: str) -> "Ring":
        settings = self.settings.model_copy(update={"redis": url, "api_id": self.api_id})
        return Ring(settings, self.tally, name=name, home=self)

    async def start(self) -> None:
        """Subscribe to our frames and announce this process; other rings have ANSWER_S to answer."""
        await self.frames.start()
        self._tasks = [asyncio.create_task(self.counts.run()), asyncio.create_task(self.load.watch())]
        for other in self.others:
            other._tasks = [asyncio.create_task(other._join())]
        if self.others:
            self._tasks.append(asyncio.create_task(self._watch()))
            joined = [asyncio.create_task(other._joined.wait()) for other in self.others]
            _, away = await asyncio.wait(joined, timeout=ANSWER_S)
            for waiting in away:
                waiting.cancel()

    async def stop(self) -> None:
        """Ends all tasks and closes the connections to Redis."""
        await asyncio.gather(*(other._let_go() for other in self.others))
        await self._let_go()
        self.patterns.close()
        await self.grammars.close()
        self.bodies.close()
        await self.image_fetch.close()

    async def _let_go(self) -> None:
        await self.frames.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.splits.close()
        await self.judges.close()
        self.images.close()
        await self.redis.aclose()

    async def _join(self) -> None:
        """Another ring: its frames come from when its Redis first answers; then look whether it does, for ever."""
        while True:
            try:
                await self.frames.start()
                break
            except (RedisError, OSError) as error:
                self.away = f"its Redis does not answer: {reason(error)}"
                await self.frames.stop()
                self.frames = FrameReader(self.settings.redis, self.api_id)
        await self._watch()

    async def _watch(self) -> None:
        answered = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await self.live_models()
                self._found("")
                self._joined.set()
                answered = time.monotonic()
            except (RedisError, OSError) as error:  # TimeoutError is an OSError
                self._found(f"its Redis does not answer: {reason(error)}")
                if self.home is not self and time.monotonic() - answered > GIVEN_UP_S:
                    self.frames.fail(self.is_away())
            await asyncio.sleep(WATCH_S)

    def _found(self, away: str) -> None:
        if bool(away) != bool(self.away):
            if away:
                log.warning("ring.away", ring=self.name, reason=away)
            else:
                log.info("ring.answers", ring=self.name, reason=away)
        self.away = away

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Around calls of a request: another ring that falls silent is not waited for as the process's own is."""
        if self.home is self:
            yield
            return
        try:
            async with asyncio.timeout(GIVEN_UP_S):
                yield
        except (RedisConnectionError, OSError) as error:  # TimeoutError is an OSError
            raise self.is_away() from error

    def is_away(self, what: str = "") -> ServiceUnavailableError:
        """The error for what needs a ring that does not answer."""
        message = f"ring '{self.name}' is away ({self.away or 'its Redis does not answer'})"
        return ServiceUnavailableError(f"{what}{message}; try again shortly", retry_after_s=2)

    async def live_models(self) -> dict[str, ModelCard]:
        """Cards of the models that a live worker serves, at most a second old."""
        if time.monotonic() - self._looked > LOOK_AGAIN_S:
            async with self._looking:  # one looks, the others wait for what it sees
                if time.monotonic() - self._looked > LOOK_AGAIN_S:
                    cards = await self.registry.models()
                    self._note_models(await self.catalogue.read())
                    self._workers = {card.name: await self.registry.workers(card.name) for card in cards}
                    self._forecasts.clear()
                    self._live = {card.name: card for card in cards if self.serving(card.name)}
                    self._waiting = await self._waits()
                    self.sent.looked()
                    self._looked = time.monotonic()
                    for card in self._live.values():
                        self.codecs.prepare(card)
        return self._live

    def _note_models(self, models: RingModels) -> None:
        now = time.monotonic()
        were = dict.fromkeys(self.models.entries, now) | self._removed
        self._removed = {
            name: at for name, at in were.items() if name not in models.entries and now - at < FORGET_REMOVED_S
        }
        self.models = models

    async def look(self) -> None:
        """Look at workers, hosts and catalogue now: the caller has just changed them, or is about to."""
        self._looked = float("-inf")
        await self.live_models()

    async def _waits(self) -> dict[str, int]:
        """Sequences that wait, by model, for models that another ring serves, too; no other figure is needed there."""
        shared = [model for model, card in self._live.items() if len(self.equals(card)) > 1]
        return {model: (await self.queue(model).unclaimed())["interactive"] for model in shared}

    def equals(self, card: ModelCard) -> "list[Ring]":
        """The rings that served a model of this name, with the same weights, when they last answered."""
        return [
            each
            for each in self.home.all
            if not each.away
            and (theirs := each._live.get(card.name)) is not None
            and weights_of(theirs) == weights_of(card)
        ]

    def crowd(self, model: str) -> Crowd:
        """How busy this ring is with a model, as of the last look and by what was sent there since."""
        return Crowd.of(self._workers.get(model, ()), self._waiting.get(model, 0), self.sent.of(model))

    @property
    def all(self) -> "tuple[Ring, ...]":
        """This ring and the others, this one first."""
        return (self, *self.others)

    @property
    def models_seen(self) -> Collection[str]:
        """Names of the live models, as of the last look."""
        return self._live

    @property
    def all_models_seen(self) -> Collection[str]:
        """The same of all rings, as `load` calls them."""
        return [each.full_name(model) for each in self.all for model in each.models_seen]

    def full_name(self, model: str) -> str:
        """A model's name among those of all rings."""
        return model if self.home is self else f"{self.name}/{model}"

    def serving(self, model: str) -> list[WorkerStatus]:
        """A model's workers that will take what is enqueued, as of the last look."""
        return [worker for worker in self._workers.get(model, ()) if worker.state in SERVING]

    def longest(self, card: ModelCard) -> int:
        """Tokens of the longest conversation: of the model's context what the KV memory of one worker holds."""
        memory = max((worker.kv_limit_bytes for worker in self.serving(card.name)), default=0)
        if not memory or not card.kv_bytes_per_token or card.kv_window:
            return card.context_length
        return min(card.context_length, memory // card.kv_bytes_per_token)

    def longest_prompt(self, card: ModelCard, behind: int = 1) -> int:
        """Tokens of the longest prompt that is taken and leaves room for `behind` more."""
        return min(self.settings.max_prompt_tokens or card.context_length, self.longest(card) - behind)

    def forecast(self, model: str, kind: SequenceClass) -> Forecast | None:
        """When first tokens of the class come, as of the last look; None: not measured, or not asked for."""
        if not self.settings.admit_by_time:
            return None
        if (model, kind) not in self._forecasts:  # once a look: a ring may have many workers
            self._forecasts[model, kind] = Forecast.of(self.serving(model), kind)
        return self._forecasts[model, kind]

    def memory_pressure(self, model: str) -> float:
        """Share of its KV memory that the worker with most room has given out, as of the last look; 0 without one."""
        shares = (worker.kv_bytes / max(1, worker.kv_limit_bytes) for worker in self.serving(model))
        return min(shares, default=0.0)

    async def check_memory(self, model: str) -> None:
        """ServiceUnavailableError when no worker of the model has room for another sequence."""
        await self.live_models()
        threshold, pressure = self.settings.memory_pressure_threshold, self.memory_pressure(model)
        if threshold and pressure >= threshold:
            raise ServiceUnavailableError(
                f"every worker of model '{model}' has given out {pressure:.0%} or more of its KV memory "
                f"(--memory-pressure-threshold {threshold}); try again shortly"
            )

    async def check_pause(self) -> None:
        """PausedError under a pause, where this server lets no new request wait for its end."""
        if self.settings.pause_new_requests == "wait":
            return
        order = await PauseSwitch(self.redis).current()
        if order is not None:
            raise PausedError(
                f"the workers are paused (POST /pause, mode {order.mode}) and this server refuses new requests until "
                "POST /resume (--pause-new-requests refuse)"
            )

    async def served(self, name: str | None) -> ServedModel:
        """The model of a request; without a name, the only one that is served or that a host can load.

        One that no worker serves now is served all the same if a host can load it: its requests wait in the queue.
        """
        live = await self.live_models()
        if name is None:
            name = _only([*live, *(model for model in self.models.entries if model not in live)])
        card = await self.live_card(name)
        if card is None:
            card = await self._cold_card(name)
        return ServedModel(card, await self.codecs.codec(card), self.queue(card.name))

    async def _cold_card(self, name: str) -> ModelCard:
        """The card of a model that no worker serves and a host can load; ServiceUnavailableError without one."""
        card, entry = await self.card(name), self.models.named(name)
        if entry is None:
            if card is None:
                known = [*self._live, *self.models.entries]
                raise UnknownModelError(f"model '{name}' does not exist; served: {_listed(known)}", param="model")
            if (live := self._live.get(card.name)) is not None:
                return live
            why = f": Redis refuses writes ({self.frames.refusal})" if self.frames.refusal else ""
            raise ServiceUnavailableError(f"no live worker serves model '{name}' at the moment{why}")
        if (why_not := obstacle(self.models, entry)) is not None:
            raise _cannot_load(entry.name, why_not)
        if card is None or (entry.sha256 and card.base_sha256 != entry.sha256):
            await self.catalogue.order("load", entry.name)
            raise ServiceUnavailableError(
                f"model '{entry.name}' is new: no host has read its tokenizer yet ({waiting_for(self.models, entry)}); "
                "try again shortly"
            )
        return card

    async def check_size(self, name: str) -> None:
        """ServiceUnavailableError for a model of the catalogue that is too large for each machine."""
        entry = self.models.named(name)
        why_not = None if entry is None or await self.live_card(name) else obstacle(self.models, entry)
        if entry is not None and why_not is not None and why_not.is_size:
            raise _cannot_load(entry.name, why_not)

    async def waiting_for(self, model: str, *, was_served: bool) -> str:
        """The reason why sequences of a model wait that no worker serves now: "loading 43%"; "" for one that is served,
        or that was never in the catalogue. ServiceUnavailableError when a host has failed to load it, or none can;
        UnknownModelError when it was taken out of the catalogue.

        `was_served`: when they were enqueued. Then what no host is to load waits for its group to come back."""
        await self.live_models()
        if self.serving(model):
            return ""
        entry = self.models.entries.get(model)
        if entry is None:
            if time.monotonic() - self._removed.get(model, float("inf")) > REMOVED_S:
                raise UnknownModelError(f"model '{model}' was removed from the catalogue meanwhile", param="model")
            return ""
        why_not = obstacle(self.models, entry) if self.models.hosts else None  # a host that has died may come back
        if why_not is None:
            return waiting_for(self.models, entry)
        if was_served and (why_not.is_size or entry.ranks > 1):
            return "waiting for a group that serves the model"
        raise _cannot_load(model, why_not)

    async def known(self, name: str) -> tuple[ModelCard, TextCodec]:
        """Card and codec of a model, whether or not a worker lives."""
        card = await self.card(name) or await self._cold_card(name)
        return card, await self.codecs.codec(card)

    async def card(self, model: str) -> ModelCard | None:
        """The card of a model, by what a request calls it: its name, or what a worker of it was given as `--model`."""
        found = await self.live_card(model) or await self.registry.card(self._named(model))
        return found or (_called(model, await self.registry.models()) if "/" in model else None)

    async def live_card(self, model: str) -> ModelCard | None:
        """The same of a model that a live worker serves, without asking Redis."""
        live = await self.live_models()
        return live.get(self._named(model)) or _called(model, live.values())

    async def knows(self, model: str) -> bool:
        """True for the name of a model that workers serve or have served, or of the catalogue."""
        return await self.card(model) is not None or self.models.named(model) is not None

    def _named(self, model: str) -> str:
        """The model that an alias of the catalogue stands for; any other name stands for itself."""
        entry = None if model in self._live else self.models.named(model)
        return model if entry is None else entry.name

    def queue_bound(self, kind: SequenceClass) -> int:
        """How many sequences of a class may wait for one model."""
        return self.settings.max_queue_size if kind == "interactive" else self.settings.max_batch_queue_size

    def queue(self, model: str) -> SequenceQueue:
        """The sequence queue of a model."""
        queue = self._queues.get(model)
        if queue is None:
            queue = SequenceQueue(self.redis, model, max_waiting={kind: self.queue_bound(kind) for kind in CLASSES})
            self._queues[model] = queue
        return queue


def _cannot_load(model: str, why_not: Obstacle) -> ServiceUnavailableError:
    message = f"model '{model}' is not loaded, and no host can load it: {why_not.reason}"
    return ServiceUnavailableError(message, retry_after_s=why_not.retry_after_s)


def _image_fetch(settings: ApiSettings) -> ImageFetch:
    return ImageFetch(settings.allowed_image_hosts, settings.max_image_bytes, settings.image_fetch_s)


async def ring_of(request: Request) -> Ring:
    """The ring that a request names or whose thing it names (`api/tenants.py`), else the app's own.

    Async, since FastAPI runs any other function in a thread.
    """
    ring: Ring = getattr(request.state, "ring", None) or request.app.state.ring
    return ring


TheRing = Annotated[Ring, Depends(ring_of)]  # as an argument of a route


def _called(source: str, cards: Iterable[ModelCard]) -> ModelCard | None:
    return min((card for card in cards if source in card.sources), key=lambda card: card.name, default=None)


def _only(names: list[str]) -> str:
    if not names:
        raise ServiceUnavailableError("no live worker serves any model at the moment")
    if len(names) > 1:
        raise InvalidRequestError(f"'model' is required: {_listed(names)} are served", param="model")
    return names[0]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or "none"
