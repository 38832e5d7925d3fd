"""Settings of an api process, which `mlx_parallm_serve` takes, too."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, Field, SecretStr

from shared.process.model_aliases import ModelAliases
from shared.process.other_rings import OtherRings
from shared.process.process_settings import ProcessSettings
from shared.sequences import LogprobsMode


def _checked_rate(rate: str) -> str:
    from limits import parse  # here, since most processes ask for none

    try:
        parse(rate or "1/second")
    except ValueError:
        raise ValueError(f"{rate!r} is no rate such as 600/minute") from None
    return rate


def _webhook_host(given: str) -> str:
    name, _, port = given.lower().partition(":")
    if not name or "/" in given or "@" in given or (port and not port.isdigit()) or name in ("*", "*."):
        raise ValueError(f"{given!r} is no HOST, HOST:PORT or *.DOMAIN")
    return given.lower()


class ApiSettings(ProcessSettings):
    """Settings of the HTTP front end."""

    # -- webhooks: no request makes this server call another one unless a host is named
    webhook_hosts: list[Annotated[str, AfterValidator(_webhook_host)]] = Field(
        default=[],
        description="HOST, HOST:PORT or *.DOMAIN that webhooks may be sent to; none: webhooks are refused",
    )
    webhook_private: bool = Field(
        default=False, description="let webhook hosts have private addresses, and be reached without TLS"
    )
    webhook_hours: float = Field(default=24, gt=0, description="hours for which a webhook that fails is sent again")

    # -- images in prompts
    allowed_image_hosts: list[str] = Field(
        default=[], description="hosts that images may be fetched from by https; none: `https:` image URLs are refused"
    )
    max_image_bytes: int = Field(default=10_485_760, ge=1024, description="largest image file")
    max_images: int = Field(default=16, ge=1, le=64, description="most images in one request")
    max_image_request_bytes: int = Field(
        default=16_777_216, ge=1024, description="largest body of a request with `data:` URLs of images"
    )  # fmt: skip
    image_store_mb: int = Field(
        default=256, ge=1, description="images of one tenant that wait for workers; the least recently used are deleted"
    )
    image_fetch_s: float = Field(default=10, gt=0, description="time limit of fetching one image")

    # -- what is stored between two requests
    response_ttl_s: int = Field(
        default=604_800,
        ge=0,
        description="time without use after which a stored response or conversation is deleted; 0: none are stored",
    )
    response_store_mb: int = Field(
        default=64, ge=1, description="stored responses and conversations of one tenant or key; the oldest are deleted"
    )
    feedback_ttl_days: float = Field(
        default=0,
        ge=0,
        le=365,
        description="days for which answers and their prompts are stored for /v1/feedback; 0: none are stored",
    )
    feedback_store_mb: int = Field(
        default=256, ge=1, description="answers of one tenant that are stored for feedback; the oldest are deleted"
    )
    record_ttl_s: int = Field(
        default=0,
        ge=0,
        le=30 * 86_400,
        description="seconds for which prompts and outputs are stored for /v1/replay to compute again; 0: none are "
        "stored",
    )
    session_ttl_s: int = Field(
        default=3600, ge=1, description="time without use after which a policy's state under a `session_id` is deleted"
    )
    session_store_mb: int = Field(
        default=64,
        ge=1,
        description="states under session ids of one tenant or key; the least recently used are deleted",
    )
    background_timeout_s: float = Field(default=3600, gt=0, description="deadline of a response with `background`")

    # -- requests, their bounds and who may send them
    host: str = Field(
        default="127.0.0.1", description="address to listen on; one that other machines reach requires an API key"
    )
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0: a free one")
    ollama_port: int = Field(
        default=0, ge=0, le=65535, description="second port, for Ollama's clients, which expect 11434; 0: none"
    )
    ring: OtherRings = []  # noqa: RUF012 (pydantic copies it)
    model_alias: ModelAliases = Field(
        default=[],
        description="GLOB=NAME, such as claude-*=tiny: a request for an unknown model that matches GLOB gets the model "
        "or adapter NAME; the first match counts",
    )
    default_max_tokens: int = Field(
        default=512,
        ge=1,
        validation_alias=AliasChoices("default_max_tokens", "max_tokens", "PARALLM_DEFAULT_MAX_TOKENS"),
        description="max_tokens of a request without it; at most what the model's context leaves",
    )
    max_prompt_tokens: int = Field(default=0, ge=0, description="longest prompt; 0: the model's context")
    clamp_max_tokens: bool = Field(
        default=False,
        description="shorten max_tokens to what the model's context leaves; otherwise such a request gets 400",
    )
    pause_new_requests: Literal["wait", "refuse"] = Field(
        default="wait", description="while the workers are paused, a new request waits, or is refused with 503"
    )
    logprobs_mode: LogprobsMode = Field(
        default="raw_logprobs",
        description="log-probabilities of requests and jobs that name none: the model's own, or the sampler's",
    )
    max_queue_size: int = Field(default=4096, ge=1, description="waiting interactive sequences of a model before 429")
    max_batch_queue_size: int = Field(
        default=16_384, ge=1, description="waiting batch sequences of a model before a key of class batch gets 429"
    )
    max_concurrent_requests: int = Field(
        default=1024, ge=0, description="token requests under way in one api process before 429; 0: no bound"
    )
    rate_limit: Annotated[str, AfterValidator(_checked_rate)] = Field(
        default="", description="token requests of each key, or of each address without keys, such as 600/minute"
    )
    memory_pressure_threshold: float = Field(
        default=0.9,
        ge=0,
        le=1,
        description="new requests get 503 when this share of KV memory is in use at every worker of the model; 0: off",
    )
    request_timeout_s: float = Field(default=600, gt=0, description="deadline of an interactive request")
    first_token_timeout_s: float = Field(
        default=300, gt=0, description="a sequence without a token after this time is given up (504)"
    )
    admit_by_time: bool = Field(
        default=False, description="refuse with 429 a request that would miss the deadline of its first token"
    )
    slow_reader_s: float = Field(
        default=30, gt=0, description="time after which a client that leaves 64 KiB of a response unread is cut off"
    )
    max_request_bytes: int = Field(
        default=1_048_576, ge=1024, description="largest body of a request other than uploads"
    )
    max_training_bytes: int = Field(default=67_108_864, ge=1024, description="largest body of one training update")
    max_json_values: int = Field(default=200_000, ge=1024, description="most list items and fields in one JSON body")
    max_upload_bytes: int = Field(
        default=1_073_741_824, ge=1024, description="largest JSONL upload; uploads are streamed to disk"
    )
    api_key: SecretStr = Field(
        default=SecretStr(""),
        description="API keys, separated by commas, plain or as sha256:HEX; none: requests need no key",
    )
    api_key_file: Path | None = Field(default=None, description="file of API keys, one per line, with class and limits")
    insecure: bool = Field(default=False, description="listen for other machines without any API key")
    allowed_hosts: list[str] = Field(
        default=[],
        description="host names in requests that are accepted, besides addresses, localhost and the machine's own name;"
        " '*': any, the default with keys",
    )
    cors_origins: list[str] = Field(
        default=[], description="web origins that may call from browsers; none: CORS is off"
    )
    api_id: str = Field(default="", description="id of this api process; default: random")
    uds: str = Field(default="", description="serve on a unix socket instead of a port")
    default_adapter: str = Field(default="policy", description="adapter of requests that name none: /generate, uploads")
    adapter_dirs: list[Path] = Field(default=[], description="folders that /load_adapter may read; none: it is refused")
    adapter_keep_n: int = Field(
        default=16,
        ge=0,
        description="versions that remain after an upload, besides latest, best and those in use; 0: all",
    )
    max_adapter_bytes: int = Field(default=1_073_741_824, ge=1024, description="largest adapter version")

    @property
    def feedback_ttl_s(self) -> int:
        """The days of feedback in seconds."""
        return int(86_400 * self.feedback_ttl_days)
