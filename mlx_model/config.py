"""How a model is loaded, and how much of it runs at once. Plain data, no arrays, no mlx."""

from dataclasses import dataclass

from shared.errors import SetupError
from shared.process.group_settings import Sharding
from shared.process.machine_settings import MachineSettings
from shared.process.worker_settings import SharePrompts


@dataclass(frozen=True)
class DiskConfig:
    """KV that has left memory, kept in files."""

    folder: str  # the workers of a machine may share it
    write_through: bool = False  # files are written when KV is stored, not when it is evicted from memory
    durable: bool = False  # synced and tried again, so that a power cut or a moment's trouble loses little
    async_writes: bool = True  # in a thread; else the engine's thread writes, and rows wait
    queue_size: int = 512  # files that wait to be written, at most; more are dropped
    max_retries: int = 3  # where it is durable
    flush_interval_s: float = 1.0  # for which files are gathered
    max_bytes: int = 50 * 10**9  # of the folder; 0: no bound
    ttl_s: float = 7 * 86_400.0  # since the last use; 0: no bound


@dataclass(frozen=True)
class SpeculationConfig:
    """Drafts of tokens that are to come, checked several at once (worker/engine/speculation)."""

    tokens: int = 7  # of one draft, at most
    most_rows: int = 0  # of a batch that gets drafts; 0: no bound
    ngram_max: int = 4  # ids of a row's end that are looked for, at most
    ngram_min: int = 1
    prompt_lookup: bool = True  # in the prompt, too, not only in the completion
    adapts_to_rows: bool = True  # drafts are as long, and as frequent, as a row's are accepted
    adapts_to_time: bool = True  # a step has drafts only where those take less time than they save
    overlaps: bool = True  # a step that checks drafts is given out before the one before it has been read
    reads_beside: bool | None = None  # while it is given out, in another thread; None: on CUDA
    memory_bytes: int = 0  # of what sequences have written, by prompt, for others of the same prompt; 0: none is kept
    threshold: float = 0.3  # a row whose drafts are accepted more seldom gets one where its end occurs in full length
    own_text: bool = True  # a row's own text is drafted from
    draft_model: str = ""  # a folder or a hub name; "": none
    draft_context: int = 0  # ids of a prompt that the draft model reads, the last ones; 0: all


@dataclass(frozen=True)
class MemoryConfig:
    """How much memory a process may take, and what besides the model takes it."""

    limit_bytes: int = 0  # all in all; 0: what the machine has left
    wired_bytes: int = 0  # that stay resident for a Metal GPU; 0: none
    adapter_slots: int = 0
    learner_rank: int = 0  # of an adapter that learns here
    serves: bool = True  # False: no KV is planned
    reserves: bool = False  # other processes of ours on this machine count what this one has planned


@dataclass(frozen=True)
class EngineConfig:
    """How to load the model and how much of it runs at once."""

    model: str  # a folder, a hub name or a GGUF file
    served_name: str = ""  # "": the last part of `model`
    max_rows: int = 32  # rows that hold a place in the batch, prefilling ones included
    prefill_rows: int = 32  # prompts that prefill together, at most
    prefill_chunk: int = 512  # prompt tokens between two decode steps, over all prompts; 0: measured while idle
    largest_chunk: int = 0  # that may become, while it is not measured yet, where pieces of prompts come in time
    alone: tuple[int, int] | None = None  # fewest and most at once while nothing decodes; None: four times the chunk
    prefill_area: int | None = None  # rows x width x (past + width) of a forward of prompts; None: no limit
    piece_s: float = float("inf")  # that a piece of prompts is planned to take; a late one makes the next one smaller
    lane_s: float = float("inf")  # for the prompts in our own lane between two decode steps
    quick_at_once: bool = True  # decode steps have their own forward from the first one on, not only when warmed up
    warm_up: bool = False  # decode rows of usual sizes while there are no others; on a GPU
    kv_limit_bytes: int | None = None  # None: half of what the model leaves (shared/fit)
    memory: MemoryConfig = MemoryConfig()
    dtype: str | None = None  # None: the model's own; float32 on a CPU
    max_context: int | None = None  # shortens the model's context
    trust_remote_code: bool = False
    tool_format: str = ""  # how the model writes calls and reasoning; "": by its template and vocabulary
    reasoning_format: str = ""
    top_candidates: int = 256  # tokens that are sorted before the whole vocabulary is; on a CPU only
    score_chunk_bytes: int = 64 << 20  # fp32 logits of a prompt that exist at one time
    between_steps_s: float = 0.005  # time for loading adapters between two decode steps
    prefix_cache_bytes: int = 1 << 30  # KV of earlier prompts, besides `kv_limit_bytes`; 0: none is kept
    block_size: int = 64  # tokens by which prefixes are compared and kept
    kv_bits: int = 0  # of each number of KV, 8 or 4; 0: the model's dtype
    kv_group_size: int = 64  # numbers that share a scale
    max_kv_size: int = 0  # positions that a layer of full attention holds, the last ones; 0: all
    share_prompts: SharePrompts = "auto"  # whether rows that begin alike store that once
    batch_invariant: bool = False  # each row's bits depend on the row alone (mlx_model/kv/places.py)
    keep_bytes: int = 128 << 20  # of prompts' KV copied into the prefix cache between two decode steps, about
    disk: DiskConfig | None = None  # where KV goes that the prefix cache has no room for; None: nowhere
    guest_share: float = 0.2  # of the thread's time that guests get while rows decode; 0: none
    speculation: SpeculationConfig | None = None  # None: no drafts
    image_cache_bytes: int = 256 << 20  # of images' vectors that no row uses
    sees: bool = True  # False: of a model that sees only the text is used
    sharding: Sharding = "tensor"  # what each of several ranks holds


@dataclass(frozen=True)
class SlotConfig:
    """Room for adapters on this worker."""

    slots: int = 8  # versions that rows of one batch may use at the same time
    max_rank: int = 64
    dtype: str = ""  # of the stacked weights; "": the model's activations


@dataclass(frozen=True)
class DraftKv:
    """KV that a draft model keeps of a row, besides the model's own."""

    bytes_per_token: int = 0
    most: int = 0  # tokens of a row


def memory_config(
    s: MachineSettings, *, adapter_slots: int = 0, learner_rank: int = 0, serves: bool = True
) -> MemoryConfig:
    """The part of a process's configuration about memory."""
    limit, wired = s.memory_limit_bytes, int(s.wired_limit * 1e9)
    return MemoryConfig(limit, wired, adapter_slots, learner_rank, serves, reserves=True)


def check_settings(config: EngineConfig) -> None:
    """SetupError that names what several ranks cannot have."""
    if config.disk is not None:
        raise SetupError("a worker of several ranks keeps no KV on disk: leave --ssd-folder out")
    if config.batch_invariant:
        raise SetupError("--batch-invariant: sums over ranks are not computed so; leave it or the ranks out")
    if config.speculation is not None and config.speculation.draft_model:
        raise SetupError("a worker of several ranks has no draft model: leave --draft-model-path out")
