"""One settings model per process: flags > environment (`PARALLM_*`) > YAML > defaults; unknown keys fail.

`load(ServeSettings, argv)` parses a command line. `--config FILE` (or `PARALLM_CONFIG`) names the YAML file;
`--dry-run` checks what a start would check, prints what was resolved, secrets hidden, and exits.
"""

import difflib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, cast

import yaml
from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from shared.errors import SetupError
from shared.process import nested_config, settings_file
from shared.process.foreign_flags import native
from shared.process.options.group import GroupSettings
from shared.process.options.kv import KvSettings, PeerSettings
from shared.process.options.model_aliases import ModelAliases
from shared.process.options.rates import Rate
from shared.process.options.responses import ResponseSettings
from shared.process.options.rings import OtherRings
from shared.process.options.speculation import SpeculationSettings
from shared.process.options.ssd import SsdSettings
from shared.process.options.webhooks import WebhookSettings
from shared.process.panels import Panels, in_panels
from shared.redis.connection import address
from shared.sequences import LogprobsMode


def version() -> str:
    """Version of the installed package; "unknown" where the code runs without one."""
    try:
        return importlib.metadata.version("mlx-parallm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


S = TypeVar("S", bound="ProcessSettings")


class PrefixedEnvironment(EnvSettingsSource):
    """`PARALLM_*` only. Without it the aliases of settings would take another program's `MODEL` or `REDIS_URL`."""

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name: value for name, value in super()._load_env_vars().items() if name.startswith("parallm_")}


class ProcessSettings(BaseSettings):
    """Settings of every process."""

    model_config = SettingsConfigDict(
        env_prefix="PARALLM_",
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        populate_by_name=True,
        protected_namespaces=(),
    )
    config_file: ClassVar[Path | None] = None
    is_trainer: ClassVar[bool] = False
    panels: ClassVar[Panels] = {}  # of `--help`; {}: it lists the settings one after another

    redis: str = Field(
        default="",
        validation_alias=AliasChoices("redis", "redis_url", "PARALLM_REDIS_URL"),
        description="Redis URL, redis+sentinel://HOST/SERVICE and redis+cluster://HOST too; empty: an embedded server",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    log_json: bool | None = Field(default=None, description="JSON log lines; default: when not on a terminal")
    otlp_endpoint: str = Field(
        default="",
        validation_alias=AliasChoices("otlp_endpoint", "otlp_traces_endpoint", "PARALLM_OTLP_ENDPOINT"),
        description="OpenTelemetry collector that gets traces, such as http://127.0.0.1:4318; needs the extra `traces`",
    )
    dry_run: bool = Field(default=False, description="check the settings, print what was resolved, and exit")
    config: str = Field(default="", description="YAML file with settings")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags come through init; then the environment, then YAML."""
        sources: list[PydanticBaseSettingsSource] = [init_settings, PrefixedEnvironment(settings_cls)]
        if cls.config_file is not None:
            given: dict[str, Any] = yaml.safe_load(cls.config_file.read_bytes()) or {}
            sources.append(InitSettingsSource(settings_cls, cls.from_file(given)))
        return tuple(sources)

    @classmethod
    def from_file(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The part of a settings file that this process takes; SetupError for what no process has."""
        rank = cls.model_fields["lora_rank"].default if "lora_rank" in cls.model_fields else 0
        names, server = (nested_config.snake(kind.flags()) for kind in (cls, ServeSettings))
        return nested_config.flat(given, names, server=server, trains=cls.is_trainer, default_rank=rank)

    @classmethod
    def flags(cls) -> frozenset[str]:
        """The names that the command line takes, without the dashes."""
        names = set(cls.model_fields)
        for field in cls.model_fields.values():
            if isinstance(field.validation_alias, AliasChoices):
                names.update(map(str, field.validation_alias.choices))
        return frozenset(name.replace("_", "-") for name in names)

    def check(self) -> None:
        """SetupError when settings contradict each other."""

    def resolved(self) -> str:
        """The settings as YAML, secrets hidden."""
        shown = self.model_dump(mode="json")
        for name in shown:
            if name.endswith(("redis", "_endpoint", "_url")):
                shown[name] = address.shown(shown[name])
        return yaml.safe_dump(shown, sort_keys=False)

    def environment(self) -> dict[str, str]:
        """The settings as `PARALLM_*` variables for a child process; its command line stays free of secrets."""
        variables: dict[str, str] = {}
        for name, value in self:
            if value is None or name in ("dry_run", "config"):
                continue
            if isinstance(value, (list, tuple, dict)):
                text = json.dumps(value if isinstance(value, dict) else [str(item) for item in value])
            else:
                text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
            variables["PARALLM_REDIS_URL" if name == "redis" else f"PARALLM_{name.upper()}"] = text
        variables["PARALLM_CONFIG"] = ""  # all of it is resolved
        return variables


class JoinSettings(ProcessSettings):
    """Settings of a process that can join a ring through one of its apis (`shared/process/discovery.py`)."""

    connect_to: str = Field(default="", description="the ring to join: an api of it (HOST:PORT) or its Redis")
    connect_key: SecretStr = Field(default=SecretStr(""), description="API key for the api that --connect-to names")
    redis_password: SecretStr = Field(default=SecretStr(""), description="of its Redis: an api does not tell it")

    def check(self) -> None:
        """SetupError when settings contradict each other."""
        if self.redis and self.connect_to:
            raise SetupError("--redis and --connect-to both name a ring: give one of them")


class WorkerSettings(JoinSettings, KvSettings, SsdSettings, PeerSettings, SpeculationSettings, GroupSettings):
    """`mlx_parallm_worker`: one per Mac."""

    model: str = Field(
        default="models/tiny",
        validation_alias=AliasChoices("model", "model_path", "PARALLM_MODEL"),
        description="model folder or hub name",
    )
    served_model_name: str = Field(
        default="", description="name in the API; default: the last part of --model, which a request may also say whole"
    )
    allow_other_weights: bool = Field(
        default=False, description="join although workers of this name have other weights, dtype, KV bits or tokenizer"
    )
    worker_id: str = Field(default="", description="default: host name and a random part")
    max_batch_size: int = Field(
        default=32,
        ge=1,
        validation_alias=AliasChoices("max_batch_size", "max_batch", "PARALLM_MAX_BATCH_SIZE"),
        description="rows that decode together",
    )
    prefill_batch_size: int = Field(default=128, ge=1, description="prompts that prefill together, at most")
    prefill_chunk: int = Field(
        default=0, ge=0, description="prompt tokens between two decode steps; 0: as many as this machine feeds in 50 ms"
    )
    warm_up: bool = Field(
        default=True, description="on a GPU: decode rows of usual sizes while there are no others, to compile kernels"
    )
    reserved_interactive_rows: int = Field(default=2, ge=0, description="rows that batch work never takes")
    interactive_share: float = Field(default=0.7, ge=0, le=1, description="share of rows when both classes wait")
    max_context: int = Field(default=0, ge=0, description="shorten the model's context; 0: the model's own")
    dtype: Literal["", "float32", "float16", "bfloat16"] = Field(
        default="", description="default: the model's; float32 on a Linux CPU"
    )
    lease_ms: int = Field(default=3000, ge=200, description="a dead worker's sequences move on after this long")
    drain_grace_s: float = Field(default=30, ge=0, description="on SIGTERM: time for running rows to finish")
    engine_stall_s: float = Field(
        default=120,
        gt=0,
        description="an engine that is silent over its work for so long is stuck: the worker restarts",
    )
    log_every_tokens: int = Field(default=16, ge=1, description="tokens between two writes of a sequence's log")
    trust_remote_code: bool = Field(default=False, description="run the model's and the tokenizer's own Python")
    adapter_slots: int = Field(default=8, ge=1, description="adapter versions that the rows of a batch may use at once")
    adapter_rank: int = Field(default=64, ge=1, le=256, description="largest rank; memory is taken for ranks in use")
    adapter_dtype: Literal["", "float32", "float16", "bfloat16"] = Field(
        default="", description="of loaded adapters; default: the model's activations"
    )
    adapter_cache_dir: Path = Field(
        default=Path(".parallm/adapters"), description="fetched adapter files; serve: adapters in --data-dir"
    )
    adapter_cache_gb: float = Field(default=4, gt=0, description="size of that folder")
    guest: str = Field(default="", description="shares the engine's thread, such as trainer.hosted:HostedTrainer")
    end_with_guest: bool = Field(default=False, description="end when the guest has done its work")
    train_config: Path | None = Field(default=None, description="YAML file of the hosted trainer's settings")
    training_share: float = Field(
        default=0.2, ge=0, lt=1, description="of the engine's time that training takes while rows decode"
    )
    training_pause_ms: float = Field(
        default=50, ge=0, description="time that one microbatch may take, and so a row wait for it; 0: not bounded"
    )

    @field_validator("prefill_chunk")
    @classmethod
    def _measured_or_enough(cls, tokens: int) -> int:
        if 0 < tokens < 16:
            raise ValueError("16 at least, or 0: measured at start")
        return tokens


class ApiSettings(ProcessSettings, ResponseSettings, WebhookSettings):
    """The HTTP front end."""

    host: str = Field(default="127.0.0.1", description="address to listen on; beyond this machine it takes a key")
    port: int = Field(default=8000, ge=0, le=65535, description="0: a free one")
    ring: OtherRings = []
    model_alias: ModelAliases = Field(
        default=[],
        description="GLOB=NAME, such as claude-*=tiny: requests for a model whose name is none of ours and matches get "
        "that model or adapter; the first that matches counts",
    )
    default_max_tokens: int = Field(
        default=512,
        ge=1,
        validation_alias=AliasChoices("default_max_tokens", "max_tokens", "PARALLM_DEFAULT_MAX_TOKENS"),
        description="of a request that does not say; at most what the model's context leaves",
    )
    max_prompt_tokens: int = Field(default=0, ge=0, description="0: the model's context")
    clamp_max_tokens: bool = Field(
        default=False, description="a request for more tokens than the model's context leaves gets those; else 400"
    )
    pause_new_requests: Literal["wait", "refuse"] = Field(
        default="wait", description="what becomes of a new request while the workers are paused; refuse: 503"
    )
    logprobs_mode: LogprobsMode = Field(
        default="raw_logprobs",
        description="log-probabilities of requests and jobs that do not say: the model's own, or the sampler's",
    )
    max_queue_size: int = Field(default=4096, ge=1, description="waiting interactive sequences of a model before 429")
    max_batch_queue_size: int = Field(
        default=16_384, ge=1, description="waiting batch sequences of a model before a key of class batch gets 429"
    )
    max_concurrent_requests: int = Field(
        default=1024, ge=0, description="requests for tokens under way in one api process before 429; 0: no bound"
    )
    rate_limit: Rate = Field(default="", description="requests for tokens of each key, or each address: 600/minute")
    memory_pressure_threshold: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="share of KV memory in use at every worker of a model from which on 503; 0: off",
    )
    request_timeout_s: float = Field(default=600, gt=0, description="deadline of an interactive request")
    first_token_timeout_s: float = Field(
        default=300, gt=0, description="a sequence without a token by then is given up (504)"
    )
    admit_by_time: bool = Field(default=False, description="refuse (429) what would miss its first token's deadline")
    slow_reader_s: float = Field(
        default=30, gt=0, description="a client that leaves its 64 KiB of a response unread for so long is cut off"
    )
    max_request_bytes: int = Field(default=1_048_576, ge=1024, description="body of a request that is no upload")
    max_training_bytes: int = Field(default=67_108_864, ge=1024, description="trajectories in one training update")
    max_json_values: int = Field(default=200_000, ge=1024, description="list items and fields in one JSON body")
    max_upload_bytes: int = Field(default=1_073_741_824, ge=1024, description="JSONL uploads, streamed to disk")
    api_key: SecretStr = Field(
        default=SecretStr(""), description="keys, with commas between; plain or as sha256:HEX; none: anybody may ask"
    )
    api_key_file: Path | None = Field(default=None, description="keys, one a line, with class and limits")
    insecure: bool = Field(default=False, description="listen beyond this machine without any key")
    allowed_hosts: list[str] = Field(
        default=[],
        description="names that clients may call this server by, besides addresses, localhost and the machine's own; "
        "'*': any, which is the default with keys",
    )
    cors_origins: list[str] = Field(
        default=[], description="web origins that may call from browsers; none: CORS is off"
    )
    api_id: str = Field(default="", description="default: random")
    uds: str = Field(default="", description="serve on a unix socket instead of a port")
    default_adapter: str = Field(default="policy", description="adapter of requests that name none: /generate, uploads")
    adapter_dirs: list[Path] = Field(default=[], description="folders that /load_adapter may read; none: refused")
    adapter_keep_n: int = Field(
        default=16, ge=0, description="versions that an upload leaves, besides latest, best and used; 0: all"
    )
    max_adapter_bytes: int = Field(default=1_073_741_824, ge=1024, description="one adapter version")


class RunnerSettings(ProcessSettings):
    """The job runner (arq worker)."""

    max_jobs: int = Field(default=16, ge=1, description="jobs that one runner advances at a time")
    window: int = Field(default=512, ge=1, description="sequences of one job in flight")
    reward_processes: int = Field(default=0, ge=0, description="0: one per core, at most 4")
    reward_timeout_s: float = Field(default=5.0, gt=0, description="one reward of one sample may take so long")
    trajectory_buffer_size: int = Field(
        default=10_000, ge=1, description="live trajectories of a policy that wait for its trainer; the oldest go"
    )
    trajectory_buffer_mb: int = Field(default=256, ge=1, description="their size; the oldest go")


class ServeSettings(WorkerSettings, ApiSettings, RunnerSettings):
    """`mlx_parallm_serve`: all of them on one machine."""

    mode: Literal["inference_and_training", "inference_only", "training_only", "inference"] = Field(
        default="inference_only",
        description="with a trainer in the first worker, without one, or the trainer without HTTP until it is done",
    )
    enable_rl_training: bool = Field(default=False, description="the same as --mode inference_and_training")
    atropos_url: str = Field(default="", description="Atropos' run-api, for the hosted trainer to learn from")
    lora_rank: int = Field(default=0, ge=0, description="of the hosted trainer's adapter; 0: as its settings say")
    learners: int = Field(default=0, ge=0, description="places for learners of a training service in the first worker")
    data_dir: Path = Field(
        default=Path(".parallm"), description="of the embedded Redis, the adapter cache, hosted runs"
    )
    workers: int = Field(default=1, ge=0, description="worker processes on this machine; 0: others will join")
    api_processes: int = Field(default=1, ge=1, description="that share the port")
    redis_port: int = Field(default=0, ge=0, le=65535, description="port of the embedded Redis; 0: a free one")

    @property
    def trains(self) -> bool:
        """Whether the first worker hosts a trainer."""
        return self.enable_rl_training or self.mode in ("inference_and_training", "training_only")

    def of(self, kind: type[S]) -> S:
        """The part of these settings that another process takes."""
        mine = self.model_dump()
        return cast(S, kind.model_construct(**{name: mine[name] for name in kind.model_fields if name in mine}))


def load(
    kind: type[S],
    argv: list[str] | None = None,
    under: Mapping[str, Any] = {},
    over: Mapping[str, Any] = {},
    rehearse: Callable[[S], str] = lambda settings: "",
) -> S:
    """Settings of one process from a command line, the environment and YAML; `under` and `over` the command line's.

    `rehearse` makes the checks of a start for `--dry-run`, and returns what is printed after the settings. Raises
    SetupError naming the wrong key; exits 0 after `--help`, `--version` and `--dry-run`.
    """
    args = native(list(sys.argv[1:] if argv is None else argv), kind.flags())
    if "--version" in args:
        print(version())
        raise SystemExit(0)
    path = settings_file.named(args)
    configured: type[S] = type(kind.__name__, (kind,), {"config_file": path, "__module__": kind.__module__})
    source: CliSettingsSource[Any] = CliSettingsSource(
        configured, cli_parse_args=args, cli_prog_name=Path(sys.argv[0]).name, **in_panels(kind.panels)
    )
    try:
        flags = source()
        settings = configured(**{**under, **flags, **over})
    except ValidationError as error:
        raise SetupError("bad settings: " + "; ".join(_complaint(kind, e) for e in error.errors())) from error
    result = cast(S, kind.model_construct(settings.model_fields_set, **settings.model_dump()))
    if result.dry_run:
        os.environ.pop("PARALLM_DRY_RUN", None)  # settings that `rehearse` loads are not to be printed there
        result.check()
        further = rehearse(result)
        print(result.resolved() + further, end="")
        raise SystemExit(0)
    return result


def _complaint(kind: type[ProcessSettings], error: ErrorDetails) -> str:
    """One wrong setting: which, and why; for a name that there is not, the nearest that there is."""
    name = ".".join(map(str, error["loc"])) or "settings"
    if error["type"] != "extra_forbidden":
        return f"{name}: {error['msg'].removeprefix('Value error, ')}"
    known = sorted(each.replace("-", "_") for each in kind.flags() if each.islower())
    near = difflib.get_close_matches(name, known, n=1)
    return f"{name}: there is no such setting" + (f"; did you mean {near[0]}?" if near else "")
