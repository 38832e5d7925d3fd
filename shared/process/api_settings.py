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
        description="HOST, HOST:PORT or *.DOMAIN that webhooks may be sent to; none: a request for one is refused",
    )
    webhook_private: bool = Field(
        default=False, description="these hosts may have private addresses, and be reached without TLS"
    )
    webhook_hours: float = Field(default=24, gt=0, description="for which a webhook that fails is tried again")

    # -- images in prompts
    allowed_image_hosts: list[str] = Field(
        default=[], description="hosts that images may be fetched from by https; none: `https:` image URLs are refused"
    )
    max_image_bytes: int = Field(default=10_485_760, ge=1024, description="one image file")
    max_images: int = Field(default=16, ge=1, le=64, description="images in one request")
    max_image_request_bytes: int = Field(
        default=16_777_216, ge=1024, description="body of a chat or response with its `data:` URLs of images; what "
        "else there is in it counts as in any request"
    )  # fmt: skip
    image_store_mb: int = Field(
        default=256, ge=1, description="images of one tenant that wait for workers; those used longest ago are deleted"
    )
    image_fetch_s: float = Field(default=10, gt=0, description="for the fetch of one image")

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
        description="for which answers and their prompts are stored, to be judged by /v1/feedback; 0: none are",
    )
    feedback_store_mb: int = Field(
        default=256, ge=1, description="answers of one tenant that are stored for feedback; the oldest are deleted"
    )
    record_ttl_s: int = Field(
        default=0,
        ge=0,
        le=30 * 86_400,
        description="time for which outputs are stored, with their prompts, for /v1/replay to compute it again; "
        "0: it is not stored",
    )
    session_ttl_s: int = Field(
        default=3600, ge=1, description="time without use after which a policy's state under a `session_id` is deleted"
    )
    session_store_mb: int = Field(
        default=64,
        ge=1,
        description="states under session ids of one tenant or key; those used longest ago are deleted",
    )
    background_timeout_s: float = Field(default=3600, gt=0, description="deadline of a response with `background`")

    # -- requests, their bounds and who may send them
    host: str = Field(default="127.0.0.1", description="address to listen on; beyond this machine it takes a key")
    port: int = Field(default=8000, ge=0, le=65535, description="0: a free one")
    ollama_port: int = Field(
        default=0, ge=0, le=65535, description="a second port, on which Ollama's clients look: 11434; 0: none"
    )
    ring: OtherRings = []  # noqa: RUF012 (pydantic copies it)
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
    rate_limit: Annotated[str, AfterValidator(_checked_rate)] = Field(
        default="", description="requests for tokens of each key, or each address: 600/minute"
    )
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
        default=30, gt=0, description="time after which a client that leaves 64 KiB of a response unread is cut off"
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

    @property
    def feedback_ttl_s(self) -> int:
        """The days of feedback in seconds."""
        return int(86_400 * self.feedback_ttl_days)
