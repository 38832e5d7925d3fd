"""Night school: one run a night, from what users' sessions teach; its versions are candidates until one is promoted.

A night is from noon to noon, and has one run: `night-YYYY-MM-DD`, with a folder of its own. It begins when all
conditions hold. While somebody asks, the run is held in its place (trainer/learn/learn_when.py); when the window or
the mains end, it ends with its last checkpoint, its memory is free by day, and the next night goes on with it. A run
begins with the version that is the latest then, and learns from turns that are newer than the night which made that.

Invariants. A folder without `report.json` is a run to go on with; whatever ends a run for good writes that. Nobody is
served by what a night has made before a person promotes it.
"""

import asyncio
import datetime
import gc
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from mlx_model.config import EngineConfig, memory_config
from mlx_model.loader import LoadedModel, load_model
from shared.adapters import version_id
from shared.errors import EngineError, ParallmError, QueueFullError, ServiceUnavailableError
from shared.machine.power import machine_power
from shared.night import OUTCOMES, NightOutcome, NightReport
from shared.process.loops import cancel
from shared.redis.adapters.store import AdapterStore
from shared.redis.connection.client import connect, require
from trainer.learn.compute import ThreadHost, at_once
from trainer.learn.learn_when import LearnWhen, Permission
from trainer.night.morning import FILE, Begun, publish, report_of, reports_in
from trainer.ring.http_client import HttpApi
from trainer.ring.over_http import HttpQueue
from trainer.runs import stopping
from trainer.runs.data import DataRun, train_on_data
from trainer.runs.distillation.distilling import DistillRun
from trainer.runs.distillation.hindsight import NothingToLearnError
from trainer.runs.run import GaveUpError
from trainer.settings import TrainSettings
from trainer.versions.checkpoint import write_whole
from trainer.versions.run_folder import note_interruption

log = structlog.get_logger()

BEGUN = "night.json"  # in a run's folder
LOOK_S = 5.0
NOTHING_S = 1_800.0  # after sessions with too few lessons: there may be more later in the night
AGAIN_S = 30.0  # after the ring was away
CLOSED_S = 60.0  # a window or the mains have to be over for so long before a run ends
STOPPED = "the process ended"
_MAY_PASS = (ServiceUnavailableError, QueueFullError, EngineError, RedisError, OSError)


class School:
    """One policy's nights, until it is stopped."""

    def __init__(self, settings: TrainSettings) -> None:
        self._settings = settings
        when = settings.conditions
        self._daily = LearnWhen(plugged=when.plugged, windows=when.windows)  # what holds for hours, or does not
        self._stop = asyncio.Event()
        self._run: DataRun[Any] | None = None

    async def run(self) -> None:
        """Hold one run a night until a signal comes."""
        running = asyncio.current_task()
        assert running is not None
        stopping.obey(self.stop, self._stop.is_set, running.cancel)
        log.info("night.waits", learn_when=self._settings.learn_when or "always", policy=self._settings.adapter)
        while not self._stop.is_set():
            if await self._hindrance() or (folder := self.due()) is None:
                await self._pause(LOOK_S)
                continue
            try:
                await self._night(folder)
            except _MAY_PASS as error:
                log.warning("night.ring_away", reason=str(error)[:500], again_in_s=AGAIN_S)
                await self._pause(AGAIN_S)

    def stop(self) -> None:
        """End after the train step under way, which a checkpoint then holds."""
        self._stop.set()
        if self._run is not None:
            self._run.stop()

    def due(self, now: datetime.datetime | None = None) -> Path | None:
        """Folder of the run that is to begin, or to go on; None: this night's is done."""
        nights = sorted(path.parent for path in self._settings.run_dir.glob(f"*/{BEGUN}"))
        if nights and not (nights[-1] / FILE).exists():
            return nights[-1]
        tonight = self._settings.run_dir / night_of(now or datetime.datetime.now())
        return None if (tonight / FILE).exists() else tonight

    async def _hindrance(self) -> str:
        source = await asyncio.to_thread(lambda: machine_power().source) if self._daily.plugged else "unknown"
        return self._daily.hindrance(datetime.datetime.now().time(), source, quiet_s=0.0)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)

    # -- one night

    async def _night(self, folder: Path) -> None:
        settings = self._settings
        url = await settings.ring_url()
        await require(url)
        async with HttpApi.of(settings) as api:
            await self._quiet(HttpQueue(api, base_of(settings)))
        if self._stop.is_set():
            return
        redis = connect(url)
        try:
            begun = await self._begun(folder, AdapterStore(redis))
            await self._school(run_settings(settings, folder, begun), begun, redis)
        finally:
            await redis.aclose()

    async def _quiet(self, queue: HttpQueue) -> None:
        """Return when nobody asks, before a model takes memory; or when the school ends."""
        async with Permission(LearnWhen(idle=self._settings.conditions.idle), queue.is_asked) as permission:
            permission.ends_with(self._stop)
            await permission.wait()

    async def _begun(self, folder: Path, store: AdapterStore) -> Begun:
        latest = await store.latest(self._settings.adapter)
        return await asyncio.to_thread(begin, folder, latest)

    async def _school(self, settings: TrainSettings, begun: Begun, redis: Redis) -> None:
        outcome: NightOutcome | None = None
        why = ""
        try:
            await self._learn(settings)
        except _MAY_PASS:
            raise
        except NothingToLearnError as error:
            log.info("night.nothing", why=str(error), again_in_s=NOTHING_S)
            await self._pause(NOTHING_S)
            return
        except ParallmError as error:
            outcome, why = ("rejected" if isinstance(error, GaveUpError) else "failed"), str(error)
            log.error("night.failed", reason=why[:1000])
        except Exception as error:  # of this run's alone: the school goes on with the next night
            outcome, why = "failed", f"{type(error).__name__}: {error}"
            log.exception("night.failed")
        report = await asyncio.to_thread(report_of, settings, begun, outcome, why)
        await publish(report, settings.folder, redis)
        _log(report)

    async def _learn(self, settings: TrainSettings) -> None:
        async with ThreadHost() as host:
            memory = memory_config(settings, learner_rank=settings.lora_rank, serves=False)
            config = EngineConfig(settings.model, dtype=settings.dtype or None, memory=memory)

            async def loaded() -> LoadedModel:
                return await host.run(at_once(lambda: load_model(config)))

            closing = asyncio.create_task(self._close())
            try:
                await train_on_data(DistillRun, settings, host, loaded, self._runs)
            finally:
                await cancel([closing])
                self._run = None
                gc.collect()

    def _runs(self, run: DataRun[Any]) -> None:
        self._run = run
        if self._stop.is_set():
            run.stop()

    async def _close(self) -> None:
        """End the run, to go on another night, once its window or the mains have been over for a while."""
        over_since: float | None = None
        while over_since is None or time.monotonic() - over_since < CLOSED_S:
            await asyncio.sleep(LOOK_S)
            hindrance = await self._hindrance()
            over_since = (over_since or time.monotonic()) if hindrance else None
        log.info("night.over", hint="the next night goes on with the run")
        if self._run is not None:
            self._run.stop()


def begin(folder: Path, latest: int) -> Begun:
    """The state in which a folder's run began; a new one begins now, with `latest`."""
    with suppress(OSError):
        begun = msgspec.json.decode((folder / BEGUN).read_bytes(), type=Begun)
        note_interruption(folder, STOPPED)
        return begun
    since_ms = next((each.began_ms for each in reports_in(folder.parent) if each.version == latest > 0), 0)
    begun = Begun(time.time_ns() // 1_000_000, latest, since_ms)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / BEGUN, msgspec.json.encode(begun))
    return begun


def run_settings(settings: TrainSettings, folder: Path, begun: Begun) -> TrainSettings:
    """Settings of a night's run. Its teacher is what it begins with, unless they name one."""
    start = version_id(settings.adapter, begun.began_with) if begun.began_with else ""
    teacher = settings.teacher or start or base_of(settings)
    return settings.model_copy(
        update={
            "mode": "distill", "candidate": True, "dataset": Path(f"sessions:{settings.adapter}"), "run": folder.name,
            "run_dir": folder.parent, "start_from": start, "lessons_since_ms": begun.since_ms,
            "teacher": teacher,
        }
    )  # fmt: skip


def base_of(settings: TrainSettings) -> str:
    """Name under which workers serve the base, where they have no other one for it."""
    return settings.model.rstrip("/").rsplit("/", 1)[-1]


def night_of(now: datetime.datetime) -> str:
    """Name of the night's run: nights are from noon to noon."""
    return f"night-{now - datetime.timedelta(hours=12):%Y-%m-%d}"


def _log(report: NightReport) -> None:
    log.info(
        "night.report", outcome=report.outcome, says=OUTCOMES[report.outcome], version=report.version or None,
        sessions=report.sessions, rows=report.rows, suite_before=report.suite_before, suite_after=report.suite_after,
        interruptions=report.interrupted, why=report.why[:500],
    )  # fmt: skip
