"""Settings of a worker, which `mlx_parallm_serve` takes, too."""

from pathlib import Path
from typing import Literal, Self

from pydantic import AliasChoices, Field, ValidationInfo, field_validator, model_validator

from shared.process.group_settings import GroupSettings
from shared.process.host_settings import HostSettings
from shared.process.machine_settings import MachineSettings
from shared.process.process_settings import JoinSettings
from shared.text.languages.families import REASONING_FORMATS, TOOL_FORMATS

SharePrompts = Literal["auto", "always", "off"]

LINGER_S = 15.0  # that a worker stays at its end for others to fetch KV from, at most


class WorkerSettings(JoinSettings, GroupSettings, MachineSettings, HostSettings):
    """Settings of `mlx_parallm_worker`, of which a Mac runs one."""

    # -- speculative decoding; the names are those of other servers
    spec_decode: Literal["none", "ngram", "draft", "auto"] = Field(
        default="none",
        description="draft tokens and check several in one step: ngram (from the row's own text and the client's "
        "prediction), draft (by --draft-model-path), auto (both, and from earlier completions of the same "
        "prompt)",
    )
    draft_model_path: str | None = Field(
        default=None,
        description="smaller model with the same tokenizer, folder or hub name, that drafts where no text matches",
    )
    draft_context_len: int = Field(
        default=0, ge=0, description="last tokens of a prompt that the draft model reads; 0: all"
    )
    num_speculative_tokens: int = Field(default=7, ge=1, le=32, description="most tokens of a draft")
    spec_decode_disable_batch_size: int = Field(
        default=8,
        ge=0,
        description="batches of more rows than this draft nothing; 0: no bound, only measured times decide",
    )
    ngram_max: int = Field(default=4, ge=1, le=32, description="most tokens of a row's end that are searched for")
    ngram_min: int = Field(default=1, ge=1, le=32, description="fewest tokens of a row's end that are searched for")
    ngram_prompt_lookup: bool = Field(default=True, description="search the prompt, too, not only the completion")
    spec_decode_dynamic: bool = Field(
        default=True, description="adapt the length and frequency of a row's drafts to how many were accepted"
    )
    adaptive_k: bool = Field(
        default=True, description="draft only where steps with drafts bring more tokens per second"
    )
    spec_decode_acceptance_threshold: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="a row with a smaller share of accepted drafts gets one only where --ngram-max tokens match",
    )
    spec_decode_memory_mb: int = Field(
        default=64,
        ge=1,
        description="with auto: memory for texts of earlier sequences, by prompt and tenant; the oldest are deleted",
    )
    spec_decode_ring_memory_mb: int = Field(
        default=64, ge=0, description="with auto: the same in Redis, shared by all workers of the ring; 0: not shared"
    )
    spec_decode_ring_memory_ttl_s: int = Field(
        default=86_400, ge=60, description="seconds after its last use for which Redis stores a prompt's completions"
    )

    # -- KV that workers fetch from one another
    kv_transfer: bool = Field(
        default=False,
        description="fetch the KV of sequences that move here from the worker that has it, where that is faster than "
        "computing it; workers listen for one another",
    )
    kv_transfer_host: str = Field(
        default="",
        description="address of this machine on which to listen for that; default: the one from which it reaches Redis",
    )

    # -- checks of what other workers wrote
    replay_share: float = Field(
        default=0,
        ge=0,
        le=1,
        description="share of sequences that idle workers compute again to check one another's tokens",
    )
    on_wrong_tokens: Literal["alert", "drain"] = Field(
        default="alert",
        description="when two other workers find this one's tokens wrong: report it (alert), or end as well (drain)",
    )

    # -- KV of earlier prompts, in memory and on disk: no disk is filled unless a folder is named
    prefix_cache_gb: float = Field(
        default=1.0,
        ge=0,
        description="memory for KV of earlier prompts, in addition to the KV memory, less where memory is short; 0: "
        "none",
    )
    ssd_cache_dir: Path | None = Field(
        default=None,
        description="folder for KV that does not fit the prefix cache, shared by all workers of a machine; none: no "
        "files",
    )
    ssd: bool = Field(default=True, description="use that folder, if one is named")
    ssd_ttl_days: float = Field(
        default=7, ge=0, description="time without use after which a file is deleted; 0: none is"
    )
    ssd_policy: Literal["evict_only", "write_through"] = Field(
        default="evict_only",
        description="write KV when it is evicted from memory and at the end, or as soon as it is stored",
    )
    ssd_durability: Literal["best_effort", "persistent"] = Field(
        default="best_effort", description="persistent: files are synced, and writes that fail are tried again"
    )
    ssd_async_writes: bool = Field(
        default=True, description="write in a thread; without, running rows wait for the disk"
    )
    ssd_writer_queue_size: int = Field(
        default=512, ge=1, description="most files that wait to be written; further ones are dropped"
    )
    ssd_persistent_max_retries: int = Field(
        default=3, ge=0, description="retries of a write that fails, with --ssd-durability persistent"
    )
    ssd_flush_interval_s: float = Field(
        default=1, ge=0, description="seconds for which files are gathered before a write"
    )
    ssd_max_size_gb: float = Field(default=50, ge=0, description="size of that folder, all files together; 0: no bound")

    # -- KV of rows
    kv_memory_gb: float = Field(
        default=0,
        ge=0,
        description="KV memory limit; 0: half of the memory that the model leaves, divided by our other processes on "
        "this machine",
    )
    block_size: int = Field(default=64, ge=16, description="tokens by which the prefix cache compares prompts")
    kv_bits: int = Field(default=0, description="quantise KV to 8 or 4 bits; 0: not quantised")
    kv_group_size: int = Field(default=64, ge=32, le=128, description="numbers of KV with one scale: 32, 64 or 128")
    max_kv_size: int = Field(
        default=0,
        ge=0,
        description="last positions of a sequence that a layer of full attention keeps; 0: all. Forgetting the others "
        "changes answers",
    )
    share_prompts: SharePrompts = Field(
        default="auto",
        description="store and read the common beginning of a batch's rows once: auto (where more rows fit the memory, "
        "or steps are no slower), always, off",
    )

    batch_invariant: bool = Field(
        default=False,
        description="compute each row so that its bits do not depend on other rows, its place, pieces of prompts or "
        "caches; without speculation, shared prompts and images. All workers of a model need the same",
    )

    # -- the model, its batch and its life
    model: str = Field(
        default="models/tiny",
        validation_alias=AliasChoices("model", "model_path", "PARALLM_MODEL"),
        description="model folder, hub name or GGUF file",
    )
    served_model_name: str = Field(
        default="",
        description="name in the API; default: the last part of --model; requests may also give --model in full",
    )
    allow_other_weights: bool = Field(
        default=False,
        description="join although other workers of this name have other weights, dtype, KV bits or tokenizer",
    )
    worker_id: str = Field(default="", description="id of this worker; default: host name and a random part")
    max_batch_size: int = Field(
        default=32,
        ge=1,
        validation_alias=AliasChoices("max_batch_size", "max_batch", "PARALLM_MAX_BATCH_SIZE"),
        description="rows that decode together",
    )
    prefill_batch_size: int = Field(default=128, ge=1, description="most prompts that prefill together")
    prefill_chunk: int = Field(
        default=0,
        ge=0,
        description="prompt tokens between two decode steps; 0: as many as this machine computes in 50 ms",
    )
    warm_up: bool = Field(
        default=True, description="on a GPU: decode rows of usual sizes while idle, to compile kernels"
    )
    reserved_interactive_rows: int = Field(default=2, ge=0, description="rows that batch work never takes")
    interactive_share: float = Field(
        default=0.7, ge=0, le=1, description="share of rows for interactive sequences when both classes wait"
    )
    max_context: int = Field(default=0, ge=0, description="shorten the model's context; 0: the model's own")
    dtype: Literal["", "float32", "float16", "bfloat16"] = Field(
        default="", description="data type of the weights; default: the model's; float32 on a Linux CPU"
    )
    lease_ms: int = Field(
        default=3000, ge=200, description="time after which a dead worker's sequences move to other workers"
    )
    drain_grace_s: float = Field(default=30, ge=0, description="on SIGTERM: time for running rows to finish")
    drain_batch: bool = Field(
        default=True,
        description="on SIGTERM: batch rows, too, get that time; else they go back to the queue at once, as where a "
        "model makes room for another one",
    )
    engine_stall_s: float = Field(
        default=120,
        gt=0,
        description="time without a step after which an engine with work counts as stuck, and the worker restarts",
    )
    log_every_tokens: int = Field(default=16, ge=1, description="tokens between two writes of a sequence's log")
    tool_format: str = Field(
        default="",
        description="form in which the model writes tool calls, such as hermes or qwen3_coder (all are in "
        "docs/reference/models.md); default: by its chat template and vocabulary",
    )
    reasoning_format: str = Field(
        default="",
        description="marks around the model's reasoning, such as think, or none; default: by its chat template and "
        "vocabulary",
    )
    trust_remote_code: bool = Field(default=False, description="run the Python code of the model and its tokenizer")
    adapter_slots: int = Field(default=8, ge=1, description="adapter versions that the rows of a batch may use at once")
    adapter_rank: int = Field(
        default=64, ge=1, le=256, description="largest rank of an adapter; memory is taken for ranks in use"
    )
    adapter_dtype: Literal["", "float32", "float16", "bfloat16"] = Field(
        default="", description="data type of loaded adapters; default: that of the model's activations"
    )
    adapter_cache_dir: Path = Field(
        default=Path(".parallm/adapters"), description="folder of fetched adapter files; serve: adapters in --data-dir"
    )
    adapter_cache_gb: float = Field(default=4, gt=0, description="size of that folder")
    guest: str = Field(
        default="", description="class that shares the engine's thread, such as trainer.hosted:HostedTrainer"
    )
    end_with_guest: bool = Field(default=False, description="end when the guest has done its work")
    train_config: Path | None = Field(default=None, description="YAML file of the hosted trainer's settings")
    training_share: float = Field(
        default=0.2, ge=0, lt=1, description="share of the engine's time that training takes while rows decode"
    )
    training_pause_ms: float = Field(
        default=50, ge=0, description="longest time of one microbatch, for which rows wait; 0: not bounded"
    )

    @field_validator("kv_bits")
    @classmethod
    def _known_bits(cls, bits: int) -> int:
        if bits not in (0, 4, 8):
            raise ValueError(f"{bits} must be 8 or 4, the bits of quantised KV, or 0: not quantised")
        return bits

    @field_validator("tool_format", "reasoning_format")
    @classmethod
    def _known_format(cls, name: str, info: ValidationInfo) -> str:
        known = TOOL_FORMATS if info.field_name == "tool_format" else REASONING_FORMATS
        if name and name not in known:
            raise ValueError(f"'{name}' is none of {', '.join(known)}")
        return name

    @field_validator("prefill_chunk")
    @classmethod
    def _measured_or_enough(cls, tokens: int) -> int:
        if 0 < tokens < 16:
            raise ValueError("16 at least, or 0: measured at start")
        return tokens

    @model_validator(mode="after")
    def _drafts_agree(self) -> Self:
        if self.ngram_min > self.ngram_max:
            raise ValueError("--ngram-min must not be more than --ngram-max")
        if self.spec_decode == "draft" and self.draft_model_path is None:
            raise ValueError(
                "--spec-decode draft needs a draft model: --draft-model-path; ngram and auto work without one"
            )
        if self.draft_model_path is not None and self.spec_decode not in ("draft", "auto"):
            raise ValueError("--draft-model-path is used with --spec-decode draft or auto")
        if self.draft_context_len and self.draft_model_path is None:
            raise ValueError("--draft-context-len needs a draft model: --draft-model-path")
        return self

    @model_validator(mode="after")
    def _peers_have_a_cache(self) -> Self:
        if self.kv_transfer and not self.prefix_cache_gb:
            raise ValueError("kv_transfer moves KV between prefix caches: --prefix-cache-gb must be more than 0")
        return self

    @model_validator(mode="after")
    def _host_serves_each_model_alone(self) -> Self:
        if not self.is_host:
            return self
        if self.from_catalogue and "model" not in self.model_fields_set:
            self.model = ""  # none is given
        for flag, given in (
            ("--guest", self.guest),
            ("--served-model-name", self.served_model_name),
            ("--distributed-hostfile", self.distributed_hostfile),
            ("--num-local-ranks", self.num_local_ranks > 1),
            ("--draft-model-path", self.draft_model_path),
        ):
            if given:
                raise ValueError(f"a process that serves several models cannot have {flag}: run a worker of its own")
        return self

    @property
    def given_models(self) -> tuple[str, ...]:
        """Models that the command line names."""
        return tuple(filter(None, (self.model, *self.models)))

    @property
    def ssd_folder(self) -> Path | None:
        """Where KV is kept; None: nowhere."""
        return self.ssd_cache_dir if self.ssd else None

    @model_validator(mode="after")
    def _ssd_has_a_folder(self) -> Self:
        if not self.ssd:
            return self
        if self.ssd_cache_dir is not None and not self.prefix_cache_gb:
            raise ValueError("--ssd-cache-dir takes what leaves the prefix cache: --prefix-cache-gb must not be 0")
        for name, field in type(self).model_fields.items():
            if name.startswith("ssd_") and self.ssd_cache_dir is None and getattr(self, name) != field.default:
                raise ValueError(f"--{name.replace('_', '-')} needs a folder: --ssd-cache-dir DIR, or leave it out")
        return self
