"""`mlx_parallm_serve`: Redis, api, job runner and workers on one machine, as child processes.

With `--redis URL`, or `--connect-to HOST:PORT` of an api, it joins an existing ring. Every process talks to the others
through Redis alone, so a second machine's `mlx_parallm_worker --redis ...` is no different from the workers started
here.
"""

import asyncio
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import structlog
import yaml
from pydantic import SecretStr
from redis.exceptions import RedisError

from api.http.api_keys import KeyRing, check_exposure, line_of, new_key
from api.http.listening import listen
from api.serve.embedded_redis import EmbeddedRedis
from api.serve.supervisor import ChildSpec, Supervisor, wait_for
from shared.errors import ServiceUnavailableError, SetupError
from shared.machine.awake import stay_awake
from shared.process import nested_config
from shared.process.api_settings import ApiSettings
from shared.process.lifeline import follow_parent
from shared.process.logs import configure
from shared.process.process_settings import RunnerSettings
from shared.process.serve_settings import ServeSettings
from shared.process.settings import load
from shared.process.worker_settings import LINGER_S, WorkerSettings
from shared.redis.connection.address import RedisUrl, shown
from shared.redis.connection.client import answers, connect, require
from shared.redis.processes.child_troubles import ChildTroubles
from shared.telemetry import tracing

log = structlog.get_logger()

TRAINER = "trainer.hosted:HostedTrainer"
LEARNERS = "trainer.service.hosted:HostedLearners"
TRAINER_FLAGS = ("lora_rank", "atropos_url", "learn_when")  # of ours that are the hosted trainer's settings
NIGHT_FLAGS = ("train_config", "lora_rank", "learn_when")  # of these, the ones that night school has a use for
EVERYWHERE = ("0.0.0.0", "::", "")  # hosts that this machine reaches as 127.0.0.1
HERE = ("127.0.0.1", "localhost", "::1")
NIGHT_FEEDBACK_DAYS = 14.0  # for which answers are stored, where the settings do not say
GUEST_FLAGS = ("training_share", "training_pause_ms", "end_with_guest")  # of ours that bound what a guest does
SECRETS = ("PARALLM_API_KEY", "PARALLM_CONNECT_KEY", "PARALLM_REDIS_PASSWORD")
SAY_EVERY_S = 60.0  # that a model is still loading
READY_ANSWER_S = 5.0
REDIS_LOOK_S = 0.2
REPORT_EVERY_S = 1.0
LAST_LOOK_S = 1.0  # at the end: without Redis no child can finish anything
REDIS_ATTEMPTS = 5


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit code."""
    try:
        settings = load(ServeSettings, argv, rehearse=_rehearse)
        _check(settings)
        stay_awake(settings.keep_awake)
        asyncio.run(settings.join())
        with _embedded(settings) as server:
            if server is not None:
                settings.redis = server.url
            return asyncio.run(_serve(settings, server))
    except (SetupError, ServiceUnavailableError) as error:
        print(f"mlx_parallm_serve: {error}", file=sys.stderr)
        return 2


def _check(settings: ServeSettings) -> None:
    """SetupError for what this process refuses by itself; afterwards the settings are ready for children."""
    configure(settings.log_level, settings.log_json)
    share_file(settings)
    check_modes(settings)
    check_exposure(settings)
    tracing.target(settings.otlp_endpoint)  # a wrong one is reported once, here
    if "adapter_cache_dir" not in settings.model_fields_set:
        settings.adapter_cache_dir = settings.data_dir / "adapters"  # of this ring, not of the working directory
    for secret in SECRETS:
        os.environ.pop(secret, None)  # no child inherits it: the apis get digests of keys, the others nothing


def _rehearse(settings: ServeSettings) -> str:
    """Check what a start checks before it joins a ring and reads weights, in a worker and in night school, too; the
    trainer's settings.

    SetupError with the words of the process that would refuse to start.
    """
    _check(settings)
    if settings.has_nights:
        _rehearsed(night_spec(settings, settings.port, ""))
    if not settings.workers:
        return ""
    # The first worker has all that the others have, and the guest.
    _, separator, guest = _rehearsed(worker_spec(settings, 0)).partition("---\n")
    return separator + guest


def _rehearsed(child: ChildSpec) -> str:
    """Run a child with `--dry-run` and return what it prints; SetupError with its words if it refuses."""
    command = [sys.executable, "-m", child.module, "--dry-run"]
    environment = {**os.environ, **child.environment}
    made = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if made.returncode:
        raise SetupError(made.stderr.strip())
    sys.stderr.write(made.stderr)
    return made.stdout


def share_file(settings: ServeSettings) -> None:
    """A file with sections of training is the hosted trainer's, too, unless it has one of its own."""
    if not settings.config or not nested_config.has_training(_given(Path(settings.config))):
        return
    if not settings.trains:
        log.warning("serve.no_training", file=settings.config, hint="add --mode inference_and_training")
    elif settings.train_config is None:
        settings.train_config = Path(settings.config)


def _given(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_bytes()) or {}


def check_modes(settings: ServeSettings) -> None:
    """SetupError when the settings contradict each other."""
    if settings.is_host and (settings.workers > 1 or settings.learners or settings.trains):
        raise SetupError(
            "a machine that serves several models has one process that starts their workers, and none of these trains: "
            "--workers 1, without --learners and --mode inference_and_training"
        )
    if settings.distributed_hostfile and settings.workers > 1:
        raise SetupError("--distributed-hostfile makes one worker of all its machines: --workers 1")
    if settings.learners:
        if not settings.workers:
            raise SetupError("--learners needs a worker on this machine: --workers 1, or run mlx_parallm_learners")
        if settings.trains or settings.guest:
            raise SetupError("--learners: the first worker has a guest already; run mlx_parallm_learners on its own")
    if settings.trains:
        if not settings.workers:
            raise SetupError("a hosted trainer needs a worker on this machine: --workers 1, or run mlx_parallm_train")
        if settings.guest:
            raise SetupError(f"--guest {settings.guest}: the first worker's guest is the trainer; leave one out")
        if settings.train_config is not None and not settings.train_config.is_file():
            raise SetupError(f"--train-config {settings.train_config}: no such file")
        return
    if settings.has_nights:
        _check_nights(settings)
    useless = [name for name in ("train_config", *TRAINER_FLAGS) if not settings.has_nights or name not in NIGHT_FLAGS]
    if settings.suite is not None and not settings.has_nights:
        raise SetupError("--suite is for night school: add --learn-when")
    if not (settings.learners or settings.guest):
        useless += GUEST_FLAGS
    for name in useless:
        if getattr(settings, name) != ServeSettings.model_fields[name].default:
            flag = f"--{name.replace('_', '-')}"
            raise SetupError(f"{flag} is for a hosted trainer: add --mode inference_and_training")


def _check_nights(settings: ServeSettings) -> None:
    """SetupError where night school could not work; answers are stored for it."""
    if settings.uds or len(settings.given_models) != 1:
        raise SetupError("--learn-when: night school learns for one --model, over a port (no --uds, no catalogue)")
    if not settings.redis and settings.host not in (*EVERYWHERE, *HERE):
        raise SetupError(f"--learn-when reaches the embedded Redis by 127.0.0.1: --host 0.0.0.0, not {settings.host}")
    if any(key.apart for key in KeyRing.of(settings)):
        raise SetupError(
            "--learn-when: sessions are each tenant's own, so on a server whose keys have tenants each tenant's policy "
            "is taught by mlx_parallm_train --over-http with that tenant's key"
        )
    for flag, file in (("--suite", settings.suite), ("--train-config", settings.train_config)):
        if file is not None and not file.is_file():
            raise SetupError(f"{flag} {file}: no such file")
    if "feedback_ttl_days" not in settings.model_fields_set:
        settings.feedback_ttl_days = NIGHT_FEEDBACK_DAYS
        log.warning("serve.stores_answers", days=NIGHT_FEEDBACK_DAYS, why="--learn-when", other="--feedback-ttl-days")
    if not settings.feedback_ttl_days:
        raise SetupError(
            "--learn-when: night school learns from stored sessions, and --feedback-ttl-days 0 stores none"
        )
    if not settings.judge_model:
        log.warning("night.no_judge", hint="only verdicts, edits, tests and exit codes count; --judge-model NAME")


@contextlib.contextmanager
def _embedded(settings: ServeSettings) -> Iterator[EmbeddedRedis | None]:
    """Our own Redis, unless the settings name one."""
    if settings.redis:
        yield None
        return
    server = EmbeddedRedis(settings.data_dir, port=settings.redis_port or None)
    server.start()
    try:
        yield server
    finally:
        server.stop()


async def _serve(settings: ServeSettings, server: EmbeddedRedis | None) -> int:
    await require(settings.redis)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    follow_parent(lambda: loop.call_soon_threadsafe(stop.set))
    supervisor = Supervisor()
    with contextlib.ExitStack() as stack:
        listeners = [] if settings.mode == "training_only" else listen(settings)
        for listener in listeners:  # which all api processes inherit
            listener.set_inheritable(True)
            stack.enter_context(listener)
        try:
            await _start_children(supervisor, settings, listeners)
            code = await _until_stopped(supervisor, settings, listeners, stop, server)
        finally:
            await supervisor.stop(at_once=not await answers(settings.redis, LAST_LOOK_S))
    return code


async def _start_children(supervisor: Supervisor, settings: ServeSettings, listeners: list[socket.socket]) -> None:
    # Stopped in the reverse order: first no new requests, then jobs, then the workers drain.
    for i in range(settings.workers):
        await supervisor.start(worker_spec(settings, i))
    if not listeners:
        return
    await supervisor.start(ChildSpec("job runner", "worker.jobs", settings.of(RunnerSettings).environment()))
    fds = tuple(listener.fileno() for listener in listeners)
    inherited = tuple(argument for fd in fds for argument in ("--fd", str(fd)))
    part_of_api = settings.of(ApiSettings)
    hashes = KeyRing.plain(settings).hashed()  # the children know the hashes alone
    key = new_key() if settings.has_nights and KeyRing.of(settings) else ""
    if key:  # of night school: it sees what all keys do, and leaves nothing for feedback
        hashes = ",".join(filter(None, [hashes, f"{line_of(key, name='night-school')} feedback=no"]))
    part_of_api.api_key = SecretStr(hashes)
    for i in range(settings.api_processes):
        environment = part_of_api.environment()
        await supervisor.start(ChildSpec(f"api {i}", "api", environment, arguments=inherited, pass_fds=fds))
    if settings.has_nights:
        await supervisor.start(night_spec(settings, listeners[0].getsockname()[1], key))


def worker_spec(settings: ServeSettings, index: int) -> ChildSpec:
    """One worker; the first one hosts the trainer, of which there is one a policy."""
    part = settings.of(WorkerSettings)
    part.worker_id = f"{settings.worker_id}-{index}" if settings.worker_id else ""
    hosts = settings.trains and index == 0
    teaches = bool(settings.learners) and index == 0
    part.guest = TRAINER if hosts else LEARNERS if teaches else part.guest
    part.end_with_guest = hosts and settings.mode == "training_only"
    environment = part.environment()
    if settings.num_local_ranks > 1 and settings.workers > 1:
        environment["CUDA_VISIBLE_DEVICES"] = devices_of(index, settings.num_local_ranks)
    if teaches:
        environment["PARALLM_MAX_LEARNERS"] = str(settings.learners)
    if hosts:
        environment["PARALLM_MODE"] = "rl"  # the trainer's setting of that name
        given = {name: str(getattr(settings, name)) for name in TRAINER_FLAGS if getattr(settings, name)}
        environment |= {f"PARALLM_{name.upper()}": value for name, value in given.items()}
        if not _names_run_dir(settings):  # a run belongs to its ring: another --data-dir is another ring
            environment["PARALLM_RUN_DIR"] = str(settings.data_dir / "train")
    return ChildSpec(
        f"worker {index}",
        "worker",
        environment,
        stop_timeout_s=settings.drain_grace_s
        + (20 if hosts or teaches or settings.is_host else 10)
        + (LINGER_S if settings.kv_transfer else 0),
        ends=part.end_with_guest,
    )


def night_spec(settings: ServeSettings, port: int, key: str) -> ChildSpec:
    """Night school, which reaches the ring through the api at this port; `key`: of its own, "" where none is wanted."""
    host = "127.0.0.1" if settings.host in EVERYWHERE else settings.host
    environment = {
        "PARALLM_CONNECT_TO": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "PARALLM_CONNECT_KEY": key,
        "PARALLM_MODEL": settings.model,
        "PARALLM_ADAPTER": settings.default_adapter,
        "PARALLM_LEARN_WHEN": settings.learn_when,
        "PARALLM_LOG_LEVEL": settings.log_level,
        "PARALLM_CONFIG": str(settings.train_config or ""),
        "PARALLM_REDIS": "",
        "PARALLM_REDIS_URL": "",
        "PARALLM_REDIS_PASSWORD": unquote(RedisUrl.of(settings.redis).password) if settings.redis else "",
    }
    given = {"DTYPE": settings.dtype, "LORA_RANK": settings.lora_rank, "TEACHER": settings.served_model_name}
    environment |= {f"PARALLM_{name}": str(value) for name, value in given.items() if value}
    if settings.log_json is not None:
        environment["PARALLM_LOG_JSON"] = str(settings.log_json)
    if settings.suite is not None:
        environment["PARALLM_SUITE"] = str(settings.suite)
    if not _names_run_dir(settings):
        environment["PARALLM_RUN_DIR"] = str(settings.data_dir / "nights")
    return ChildSpec("night school", "trainer.night", environment, stop_timeout_s=30.0)


def devices_of(index: int, ranks: int) -> str:
    """CUDA_VISIBLE_DEVICES of one worker of several that are groups: one device a rank, no two the same."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    ours = range(index * ranks, (index + 1) * ranks)
    return ",".join(visible.split(",")[ours.start : ours.stop] if visible else map(str, ours))


def _names_run_dir(settings: ServeSettings) -> bool:
    """True if the settings say where the hosted trainer's runs are stored."""
    if "PARALLM_RUN_DIR" in os.environ:
        return True
    return settings.train_config is not None and "run_dir" in nested_config.names_in(_given(settings.train_config))


async def _until_stopped(
    supervisor: Supervisor,
    settings: ServeSettings,
    listeners: list[socket.socket],
    stop: asyncio.Event,
    server: EmbeddedRedis | None,
) -> int:
    ready = asyncio.create_task(_announce(settings, listeners))
    stopped = asyncio.create_task(stop.wait())
    tended = asyncio.create_task(_tend(server))
    reporting = asyncio.create_task(_report_troubles(supervisor, settings.redis))
    waits: list[asyncio.Future[Any]] = [stopped, supervisor.failed, supervisor.ended, tended]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if tended.done():
        tended.result()
    for task in (ready, stopped, tended, reporting):
        task.cancel()
    if supervisor.failed.done():
        log.error("serve.child_gave_up", child=supervisor.failed.result().name)
        return 2
    return 0


async def _report_troubles(supervisor: Supervisor, url: str) -> None:
    """Let `/health` say which child ends again and again."""
    redis = connect(url)
    has_troubles, teller = False, f"{socket.gethostname()}:{os.getpid()}"
    try:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            troubles = supervisor.troubles()
            if troubles or has_troubles:
                with contextlib.suppress(RedisError, OSError):
                    await ChildTroubles(redis).report(teller, troubles)
                    has_troubles = bool(troubles)
    finally:
        await redis.aclose()


async def _tend(server: EmbeddedRedis | None) -> None:
    """Bring our Redis back when it dies: on its port and its data, so that everybody goes on.

    Ends, with SetupError, only when it cannot be started any more.
    """
    while True:
        await asyncio.sleep(REDIS_LOOK_S)
        if server is None or server.alive:
            continue
        log.error("serve.redis_died", port=server.port)
        for attempt in range(REDIS_ATTEMPTS):
            try:
                await asyncio.to_thread(server.restart)
                log.warning("serve.redis_restarted", port=server.port)
                break
            except SetupError:
                if attempt == REDIS_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(1.0)


async def _announce(settings: ServeSettings, listeners: list[socket.socket]) -> None:
    if not listeners:
        print(f"ParaLLM trains {settings.model}, without HTTP", flush=True)
    else:
        url = f"unix:{settings.uds}" if settings.uds else "http://{}:{}".format(*listeners[0].getsockname()[:2])
        await _ready(listeners[0], settings)
        print(f"ParaLLM is ready: {url}" + ("" if settings.uds else "/v1"), flush=True)
        for listener in listeners[1:]:
            print("Ollama's API: http://{}:{}".format(*listener.getsockname()[:2]), flush=True)
    models = " ".join(f"--model {model}" for model in settings.given_models) or "--from-catalogue"
    joining = f"mlx_parallm_worker --redis {shown(settings.redis)} {models}"
    print(f"join with another worker: {joining}", flush=True)


async def _ready(listener: socket.socket, settings: ServeSettings) -> None:
    """Return once a request can be answered, and say now and then that this takes its time."""
    path = "/readyz" if settings.workers else "/livez"

    async def ready() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return await asyncio.to_thread(_status, listener, path) == 200
        return False

    began = time.monotonic()
    while not await wait_for(ready, SAY_EVERY_S):  # a model may be downloaded for hours
        log.info("serve.waits_for_worker", for_s=round(time.monotonic() - began), hint="its log lines say what it does")


def _status(listener: socket.socket, path: str) -> int:
    """HTTP status that an api returns on the address of its listening socket."""
    connection = http.client.HTTPConnection("localhost")
    with socket.socket(listener.family) as connection.sock:
        connection.sock.settimeout(READY_ANSWER_S)
        connection.sock.connect(listener.getsockname())
        connection.request("GET", path)
        return connection.getresponse().status


if __name__ == "__main__":
    sys.exit(main())
