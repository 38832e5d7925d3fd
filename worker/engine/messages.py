"""Messages into the engine thread and out of it: plain data, no arrays, no mlx.

`EngineConfig` (mlx_model/config.py) is read once at start. `RowRequest` goes in, `StepOutput` comes out once per turn
of the loop, and `EngineStats` may be read at any time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from mlx_model.config import DiskConfig, EngineConfig, SpeculationConfig, memory_config
from shared.errors import ParallmError
from shared.frames import Finish, TokenEvent
from shared.images.refs import Picture
from shared.process.model_aliases import short_name
from shared.process.worker_settings import WorkerSettings
from shared.sequences import SequenceSpec

EndReason = Literal["cancelled", "deadline", "abort"]  # why a row ends that did not end by itself


@dataclass(frozen=True)
class RowRequest:
    """One sequence to decode; `prior` holds the events of earlier attempts, which it continues."""

    spec: SequenceSpec
    attempt: int = 1
    prior: tuple[TokenEvent, ...] = ()
    pictures: tuple[Picture, ...] = ()  # of its images

    def refused(self, error: ParallmError) -> TokenEvent:
        """The only event of a request that cannot run."""
        position = sum(len(event.tokens) for event in self.prior)
        return TokenEvent(self.spec.id, self.attempt, position, [], [], finish=Finish.failed(error))


@dataclass(frozen=True)
class StepOutput:
    """Events of one turn of the loop."""

    events: list[TokenEvent]
    busy_rows: int


@dataclass(frozen=True)
class PrefixStats:
    """The prefix cache at one time; with snapshots, prompts shorter than a block count neither as hit nor as miss."""

    bytes: int = 0
    blocks: int = 0
    hits: int = 0  # since start, in prompts; those of rows that share a prefill count once
    misses: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0
    snapshots: int = 0  # states of layers that cannot be cut
    snapshot_bytes: int = 0  # of `bytes`
    evicted_snapshots: int = 0
    tails: int = 0  # ends of short prompts that fill no block
    limit_bytes: int = 0  # that it may hold


@dataclass(frozen=True)
class DiskStats:
    """The prefix cache's files at one time; counters since start."""

    folder_id: str = ""  # of the folder, by which workers that share it know one another; "": none yet
    bytes: int = 0  # of the folder, which other workers may use, too
    limit_bytes: int = 0  # 0: no bound, or no folder
    files: int = 0  # of this model
    waiting: int = 0  # to be written
    hits: int = 0  # prompts for which KV came from files
    hit_tokens: int = 0
    written_bytes: int = 0
    evicted: int = 0  # files that this worker has removed, for room or age
    dropped: int = 0  # files that were not written: too many waited, there was no room, or the disk refused
    errors: int = 0  # of the disk, and files that were damaged or not ours


@dataclass(frozen=True)
class GuestStats:
    """A snapshot of the work of guests since start."""

    units: int = 0
    seconds: float = 0.0
    units_beside_rows: int = 0  # of them, those that ran between two decode steps
    seconds_beside_rows: float = 0.0
    longest_s: float = 0.0  # unit while there were rows: the longest that decoding has waited


@dataclass(frozen=True)
class SpeculationStats:
    """Counts of drafts since the start."""

    is_on: bool = False  # rows may get drafts: it is asked for, and all layers can forget their latest positions
    steps: int = 0  # that checked drafts
    drafts: int = 0  # a row's, in such a step
    drafted: int = 0  # tokens
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()  # by place in the draft, the first one first
    draft_model: str = ""  # its name; "": there is none, or it has failed
    model_drafted: int = 0  # of the drafted tokens, those that it said
    model_accepted: int = 0

    def plus(self, width: int, drafts: Sequence[tuple[int, int]]) -> Self:
        """With one more step of such a width; of each draft its tokens, and how many of them were accepted."""
        held_at = [*self.accepted_at, *[0] * (width - 1 - len(self.accepted_at))]
        for _, held in drafts:
            for at in range(held):
                held_at[at] += 1
        return replace(
            self,
            steps=self.steps + 1,
            drafts=self.drafts + len(drafts),
            drafted=self.drafted + sum(tried for tried, _ in drafts),
            accepted=self.accepted + sum(held for _, held in drafts),
            accepted_at=tuple(held_at),
        )


@dataclass(frozen=True)
class VisionStats:
    """Counts of images since the start."""

    encoded: int = 0
    hits: int = 0  # that were known, or under way, when a row came with them
    bytes: int = 0  # of the vectors that are kept


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine."""

    rows: int = 0  # admitted: decoding or prefilling
    warms_up: bool = False  # not all is measured or compiled yet (warm_up.py)
    prefilling: int = 0
    waiting: int = 0  # submitted, not admitted
    kv_bytes: int = 0  # reserved by the admitted rows
    kv_limit_bytes: int = 0
    kv_spared_bytes: int = 0  # that rows would hold besides if each had a copy of its prompt
    shares_prompts: bool = False  # where that lets more rows in
    steps: int = 0  # decode steps since start
    tokens: int = 0  # completion tokens since start
    last_step_ms: int = 0  # monotonic; now when the engine is idle: an old value means that it is stuck
    tokens_per_s: float = 0.0  # over the last seconds
    prefill_token_s: float = 0.0  # that a prompt's token has taken lately; 0: none was fed
    prefix: PrefixStats = field(default_factory=PrefixStats)
    guests: GuestStats = field(default_factory=GuestStats)
    disk: DiskStats = field(default_factory=DiskStats)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    vision: VisionStats = field(default_factory=VisionStats)


OnStep = Callable[[StepOutput], None]
OnDeath = Callable[[BaseException], None]


@dataclass
class Throughput:
    """Tokens per second over windows of about a second."""

    tokens: int = 0
    rate: float = 0.0
    _since: tuple[float, int] = field(default=(0.0, 0))

    def add(self, tokens: int, now: float) -> None:
        """Count tokens at monotonic time `now`."""
        self.tokens += tokens
        then, before = self._since
        if now - then >= 1.0:
            self.rate = (self.tokens - before) / (now - then) if then else 0.0
            self._since = (now, self.tokens)


def engine_config(s: WorkerSettings, learner_rank: int = 0) -> EngineConfig:
    """Translate a worker's settings for the engine. `learner_rank`: of the adapter that a guest trains."""
    return EngineConfig(
        model=s.model,
        served_name=s.served_model_name or short_name(s.model),
        max_rows=s.max_batch_size,
        prefill_rows=s.prefill_batch_size,
        prefill_chunk=s.prefill_chunk,
        warm_up=s.warm_up,
        kv_limit_bytes=int(s.kv_memory_gb * 1e9) or None,
        memory=memory_config(s, adapter_slots=s.adapter_slots, learner_rank=learner_rank),
        dtype=s.dtype or None,
        max_context=s.max_context or None,
        trust_remote_code=s.trust_remote_code,
        tool_format=s.tool_format,
        reasoning_format=s.reasoning_format,
        prefix_cache_bytes=int(s.prefix_cache_gb * 1e9),
        block_size=s.block_size,
        kv_bits=s.kv_bits,
        kv_group_size=s.kv_group_size,
        max_kv_size=s.max_kv_size,
        share_prompts="off" if s.batch_invariant else s.share_prompts,
        batch_invariant=s.batch_invariant,
        sees=not s.batch_invariant,
        disk=_disk_config(s),
        guest_share=s.training_share,
        speculation=_speculation_config(s),
        sharding=s.distributed_sharding,
    )


def _speculation_config(s: WorkerSettings) -> SpeculationConfig | None:
    if s.spec_decode == "none" or s.batch_invariant:
        return None
    return SpeculationConfig(
        tokens=s.num_speculative_tokens,
        most_rows=s.spec_decode_disable_batch_size,
        ngram_max=s.ngram_max,
        ngram_min=s.ngram_min,
        prompt_lookup=s.ngram_prompt_lookup,
        adapts_to_rows=s.spec_decode_dynamic,
        adapts_to_time=s.adaptive_k,
        threshold=s.spec_decode_acceptance_threshold,
        memory_bytes=s.spec_decode_memory_mb << 20 if s.spec_decode == "auto" else 0,
        own_text=s.spec_decode != "draft",
        draft_model=s.draft_model_path or "",
        draft_context=s.draft_context_len,
    )


def _disk_config(s: WorkerSettings) -> DiskConfig | None:
    if s.ssd_folder is None:
        return None
    return DiskConfig(
        folder=str(s.ssd_folder),
        write_through=s.ssd_policy == "write_through",
        durable=s.ssd_durability == "persistent",
        async_writes=s.ssd_async_writes,
        queue_size=s.ssd_writer_queue_size,
        max_retries=s.ssd_persistent_max_retries,
        flush_interval_s=s.ssd_flush_interval_s,
        max_bytes=int(s.ssd_max_size_gb * 1e9),
        ttl_s=s.ssd_ttl_days * 86_400,
    )
