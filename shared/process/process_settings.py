"""Settings of every process, of those that join a ring, and of a job runner. `settings.py` reads them."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import yaml
from pydantic import AliasChoices, Field, SecretStr
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from shared.errors import SetupError
from shared.process.machine_settings import AwakeSettings
from shared.process.panels import Panels
from shared.redis.connection import address


class PrefixedEnvironment(EnvSettingsSource):
    """`PARALLM_*` only. Without it the aliases of settings would take another program's `MODEL` or `REDIS_URL`."""

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name: value for name, value in super()._load_env_vars().items() if name.startswith("parallm_")}


class ProcessSettings(BaseSettings):
    """Settings that every process of ours has."""

    model_config = SettingsConfigDict(
        env_prefix="PARALLM_",
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        populate_by_name=True,
        protected_namespaces=(),
    )
    from_file: ClassVar[Mapping[str, Any]] = {}  # what the settings file says to this process
    is_trainer: ClassVar[bool] = False
    panels: ClassVar[Panels] = {}  # of `--help`; {}: it lists the settings one after another

    redis: str = Field(
        default="",
        validation_alias=AliasChoices("redis", "redis_url", "PARALLM_REDIS_URL"),
        description="Redis URL, also redis+sentinel://HOST/SERVICE or redis+cluster://HOST; empty: an embedded server",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    log_json: bool | None = Field(default=None, description="JSON log lines; default: when not on a terminal")
    otlp_endpoint: str = Field(
        default="",
        validation_alias=AliasChoices("otlp_endpoint", "otlp_traces_endpoint", "PARALLM_OTLP_ENDPOINT"),
        description="OpenTelemetry collector for traces, such as http://127.0.0.1:4318; needs the extra `traces`",
    )
    dry_run: bool = Field(default=False, description="check the settings, print the resolved ones, and exit")
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
        if cls.from_file:
            sources.append(InitSettingsSource(settings_cls, dict(cls.from_file)))
        return tuple(sources)

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
    """Settings of a process that can join a ring through one of its apis (ring_query.py)."""

    connect_to: str = Field(default="", description="the ring to join: one of its apis (HOST:PORT) or its Redis")
    connect_key: SecretStr = Field(default=SecretStr(""), description="API key for the api that --connect-to names")
    redis_password: SecretStr = Field(
        default=SecretStr(""), description="password of the ring's Redis, which an api does not give out"
    )

    def check(self) -> None:
        """SetupError when settings contradict each other."""
        if self.redis and self.connect_to:
            raise SetupError("--redis and --connect-to both name a ring: give one of them")

    async def ring_url(self) -> str:
        """The Redis of the ring that the settings name, "" if they name none; SetupError if they name it twice."""
        JoinSettings.check(self)
        if self.redis or not self.connect_to:
            return self.redis
        from shared.process.ring_query import find_redis  # and httpx: most processes are told their Redis

        key, password = self.connect_key.get_secret_value(), self.redis_password.get_secret_value()
        return await find_redis(self.connect_to, api_key=key, password=password)

    async def join(self) -> None:
        """Find the ring and put its address into `redis`; the settings that were needed for it are cleared."""
        self.redis = await self.ring_url()
        self.connect_to, self.connect_key, self.redis_password = "", SecretStr(""), SecretStr("")


class RunnerSettings(ProcessSettings, AwakeSettings):
    """Settings of a job runner (arq worker), which `mlx_parallm_serve` takes, too."""

    max_jobs: int = Field(default=64, ge=1, description="jobs that one runner advances at a time")
    window: int = Field(default=512, ge=1, description="sequences of one job in flight")
    reward_processes: int = Field(
        default=0, ge=0, description="processes that compute rewards; 0: one per core, at most 4"
    )
    reward_timeout_s: float = Field(default=5.0, gt=0, description="time that one reward of one sample may take")
    trajectory_buffer_size: int = Field(
        default=10_000,
        ge=1,
        description="live trajectories of a policy that wait for its trainer; the oldest are dropped",
    )
    trajectory_buffer_mb: int = Field(
        default=256, ge=1, description="size of these trajectories; the oldest are dropped"
    )
    judge_model: str = Field(
        default="",
        pattern=r"^\S{0,256}$",
        description="served model or adapter that labels a user's next message in stored sessions; default: none does",
    )
    judge_after_s: float = Field(
        default=1800,
        gt=0,
        description="time after a turn in which its signals are awaited before they become its reward",
    )
