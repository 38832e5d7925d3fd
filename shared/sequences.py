"""A sequence: one prompt -> one completion, the unit of queueing, leasing and decoding.

Who fills what: api or the job runner builds a `SequenceSpec` and enqueues it; the queue hands it to a worker as a
`Claim`; the worker's engine turns it into `TokenEvent`s (shared/frames.py) and one `SequenceResult`.

Messages travel as msgpack. `schema` is the version of the message; it rises when an old reader would misread a new
message, and a reader refuses what it does not know by name instead of guessing. What is only added needs no new
version: a reader leaves out fields of a message that it does not know, except in `SamplingParams`, where leaving
one out would change what is drawn: there it refuses. Field names are never reused with another meaning.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from shared.episodes import EpisodePlace
from shared.errors import IncompatibleVersionError, TokenOutOfRangeError, UnreadableMessageError
from shared.frames import Finish, TokenLogprobs, VersionSpan
from shared.heads import HeadSpec
from shared.images.refs import ImageRef, VisionSpec, kv_ids
from shared.splits import Arm

SCHEMA = 3  # the newest that we read: of a sequence that is not to be cached, or whose first tokens are given; who does
# not know that must not run it
SHOWN = 2  # of a sequence with images
PLAIN = 1  # of all others
OLDEST = 1  # that we read; also the default of a message without it

M = TypeVar("M", "SequenceSpec", "SequenceResult")

SequenceClass = Literal["interactive", "batch"]
SequenceKind = Literal["generate", "score", "embed", "head", "network"]
Pooling = Literal["mean", "last", "cls"]
AdapterPolicy = Literal["follow", "pin"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]  # vLLM's names

LEAST_TEMPERATURE = 1e-5  # vLLM's bound; logits over much less are infinite in fp32


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters by which one row draws its tokens. A row's draw depends on (seed, position) only, never on its batch.

    Filters apply in this order: logit_bias and penalties on the raw logits, then allowed and bad tokens, the grammar's
    mask, temperature, and top_k, top_p and min_p on the tempered distribution (vLLM's order).
    """

    max_tokens: int
    seed: int  # resolved at admission: a request without one gets a random one
    temperature: float = 1.0  # below `LEAST_TEMPERATURE`: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # OpenAI: on tokens of the completion
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # CTRL, arXiv 1909.05858: on tokens of prompt and completion
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # besides the model's end-of-sequence ids
    ignore_eos: bool = False
    min_tokens: int = 0  # no stop of any kind before this many tokens
    include_stop_str: bool = False  # keep the matched stop string in the text
    top_logprobs: int | None = None  # None: none; k: the k most likely tokens at each position
    prompt_logprobs: int | None = None  # likewise for the prompt's own tokens (echo)
    shown_tokens: tuple[str, ...] = ()  # special tokens that the text of a row with stop strings does not hide
    # What is reported of completion tokens: the model's own, or those of the distribution that was drawn from
    logprobs_mode: LogprobsMode = "raw_logprobs"
    grammar: str = ""  # llguidance's text (shared/text/grammar.py) of what the completion must be; "": anything
    allowed_token_ids: tuple[int, ...] = ()  # nothing else is drawn; (): anything
    bad_words: tuple[tuple[int, ...], ...] = ()  # ids that the completion must not contain in a row
    logprob_token_ids: tuple[int, ...] = ()  # log-probabilities of these in the place of the top_logprobs most likely
    prompt_logprobs_last: int = 0  # those of so many tokens at the prompt's end alone; 0: of all
    # With prompt_logprobs, of each prompt token but the first: tokens whose log-probability there is wanted, too
    prompt_named: tuple[tuple[int, ...], ...] = ()
    return_routed_experts: bool = False  # those that a mixture of experts computed each completion token with
    prompt_draws: int = 0  # with prompt_logprobs: so many tokens are drawn in the place of each, too, by temperature


class Collection(msgspec.Struct, frozen=True, omit_defaults=True):
    """Owner and reward of the trajectory that a sequence of live traffic becomes when it settles."""

    policy: str  # the trainer that gets it
    scoring: str = ""  # a name of the reward registry; "": not scored
    options: dict[str, Any] = {}  # of the reward
    reference: Any = None  # what the reward compares with
    metadata: dict[str, Any] = {}
    sample: int = 0  # among the samples of the prompt
    samples: int = 1
    answer: str = ""  # what its client knows the answer by; "": it does not wait for feedback
    answer_ttl_s: int = 0  # for so long it waits
    answers_bytes: int = 0  # that such answers of one tenant may have
    arm: Arm | None = None  # the version that a split has chosen, which its reward counts for
    place: EpisodePlace | None = None  # in its episode
    judged: bool = False  # what its user writes next may be judged


class SequenceSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that a worker needs to decode one sequence, and where its tokens go."""

    id: str  # unique; of a job: "<job>-<ordinal>", so that enqueueing again changes nothing
    model: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    sequence_class: SequenceClass = "interactive"
    kind: SequenceKind = "generate"
    group: str = ""  # the sequences of one prompt share it; "" stands alone
    score_ids: tuple[int, ...] = ()  # kind "score": the completion whose log-probabilities are wanted
    api: str = ""  # the api process that gets frames; "": the sequence is not streamed
    job: str = ""  # the job that gathers the result; "": none
    adapter: str = ""  # "": base; "name": latest version; "name@k": that version
    adapter_policy: AdapterPolicy = "pin"
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    deadline_ms: int = 0  # Unix time; 0: none
    enqueued_ms: int = 0  # Unix time
    collect: Collection | None = None  # a trajectory is wanted
    first_token_deadline_ms: int = 0  # Unix time by which the first token must have come; 0: none
    pooling: Pooling = "mean"  # kind "embed": which hidden states make the vector
    trace: str = ""  # W3C traceparent of the span that caused it; "": it is not traced
    tenant: str = ""  # who owns it (shared/owners.py)
    has_next_turn: bool = False  # another prompt may begin with this one and its completion: their KV is kept; that of
    # interactive sequences is kept in any case
    prediction_ids: tuple[int, ...] = ()  # what the client expects, at least in part; may come sooner, never changes it
    head: str = ""  # kind "head": the name of that which reads the prompt
    tensors: bytes = b""  # kind "network", which has no prompt: what its rows bring (shared/networks/tensors.py)
    images: tuple[ImageRef, ...] = ()  # of the prompt, in order; their bytes are in Redis, of this tenant
    image_token: int = 0  # the id that stands for each vector of them in the prompt
    prior_ids: tuple[int, ...] = ()  # kind "generate": its first completion tokens, which are given and not drawn
    record_s: int = 0  # for so long spec and result are stored after its end, to be replayed; 0: they are not
    schema: int = OLDEST  # `encode` writes ours
    fresh: bool = False  # its KV is computed anew: none is read from a cache, or got from another worker
    cache: bool = True  # False: what it computes, reads and writes is stored for no other sequence

    @property
    def kv_prompt(self) -> Sequence[int]:
        """Ids under which the prompt's KV is stored: image placeholders become numbers that tell images apart."""
        return kv_ids(self.prompt_ids, self.image_token, self.images) if self.images else self.prompt_ids

    @property
    def kv_tokens(self) -> int:
        """Positions of KV that this sequence may come to hold; admission counts with it."""
        if self.kind != "generate":
            return len(self.prompt_ids) + len(self.score_ids)
        return len(self.prompt_ids) + self.sampling.max_tokens


class Timings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Unix times in milliseconds; 0 where it did not happen."""

    enqueued_ms: int = 0
    started_ms: int = 0  # claimed by the worker of the last attempt
    first_token_ms: int = 0
    finished_ms: int = 0


class SequenceResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of a sequence that has ended; committed exactly once."""

    id: str
    finish: Finish
    worker: str
    attempt: int
    prompt_tokens: int
    completion_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # fp32 log-probability of each completion token (what a trainer calls mu), in
    # the mode of the spec's sampling
    top_logprobs: tuple[TokenLogprobs, ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    text: str | None = None  # only of rows with stop strings; else the reader decodes the ids
    prompt_logprobs: tuple[float | None, ...] = ()
    prompt_top_logprobs: tuple[TokenLogprobs, ...] = ()
    score_logprobs: tuple[float, ...] = ()
    embedding: bytes = b""  # kind "embed", or what a head gives: fp32, little-endian; what a network gives: tensors
    timings: Timings = Timings()
    schema: int = OLDEST  # `encode` writes ours
    routes: bytes = b""  # of each completion token, where the spec asks for them: TokenEvent.routes


class Claim(msgspec.Struct, frozen=True):
    """A sequence that a worker has leased: `entry` of `stream` is ours while the lease lasts."""

    spec: SequenceSpec
    stream: str
    entry: str
    attempt: int  # 1 for the first; writes of an older attempt are refused
    suspect: bool = False  # it may have ended its workers: only other suspects run with it


class ModelCard(msgspec.Struct, frozen=True):
    """Facts about a served model that its worker registers; api and job runner plan with them."""

    name: str
    context_length: int  # prompt + completion, in tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_sha256: str
    base_sha256: str  # of config and weights: an adapter of another base is refused
    kv_bytes_per_token: int
    dtype: str
    quantization: str = ""  # "" or like "4 bits, groups of 64"
    created: int = 0  # Unix seconds
    schema: int = PLAIN
    modules: dict[str, tuple[int, int]] = {}  # that adapters may adapt: path -> (in, out); empty: not known
    kv: str = ""  # how KV is quantised or bounded, like "8 bits, groups of 64, 28 of 28 caches"; "": it is not
    kv_window: int = 0  # positions of KV that a row holds at most, however long it is; 0: all
    kv_unshared_bytes: int = 0  # of kv_bytes_per_token, those of layers whose KV rows never share: windows
    sources: tuple[str, ...] = ()  # what its workers were given as --model: hub names, folders; requests may use these
    hidden_size: int = 0  # of the hidden states that embeddings and heads are made of; 0: not known, or it shows none
    heads: dict[str, HeadSpec] = {}  # of its own
    shows_states: bool = True  # hidden states; False: it is known that it shows none
    vision: VisionSpec | None = None  # what it does with images; None: it takes none
    kv_state_bytes: int = 0  # of a row's recurrent states, which take as much at any length

    @property
    def head_inputs(self) -> int | None:
        """Numbers that a head reads; 0: not known, None: there is nothing to read."""
        return self.hidden_size if self.shows_states else None


def held(positions: int, window: int) -> int:
    """Number of positions whose KV a row stores, with a card's `kv_window`."""
    return min(positions, window) if window else positions


def vocabulary_error(
    ids: Sequence[int] | Mapping[int, float], vocab_size: int, param: str = "", where: str = ""
) -> TokenOutOfRangeError | None:
    """The error of token ids of which one, the first of them named, is not the model's; None when all are."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return None
    wrong = next(token for token in ids if not 0 <= token < vocab_size)
    message = f"{where}: token id {wrong}" if where else f"token id {wrong}"
    return TokenOutOfRangeError(f"{message} is not in the vocabulary of {vocab_size}", param=param or None)


_encoder = msgspec.msgpack.Encoder()
_spec_decoder = msgspec.msgpack.Decoder(SequenceSpec)
_result_decoder = msgspec.msgpack.Decoder(SequenceResult)


class _Version(msgspec.Struct):
    schema: int = OLDEST


_version_decoder = msgspec.msgpack.Decoder(_Version)


def encode(message: SequenceSpec | SequenceResult) -> bytes:
    """msgpack bytes of a message, in our version."""
    schema = PLAIN
    if isinstance(message, SequenceSpec):
        schema = (
            SCHEMA if message.prior_ids or message.fresh or not message.cache else SHOWN if message.images else PLAIN
        )
    if message.schema < schema:
        message = msgspec.structs.replace(message, schema=schema)
    return _encoder.encode(message)


def decode_spec(data: bytes) -> SequenceSpec:
    """Read a spec; UnreadableMessageError when it is malformed, IncompatibleVersionError when it is not our version."""
    return _decode(_spec_decoder, data)


def decode_result(data: bytes) -> SequenceResult:
    """Read a result; errors as in `decode_spec`."""
    return _decode(_result_decoder, data)


def _decode(decoder: "msgspec.msgpack.Decoder[M]", data: bytes) -> M:
    try:
        message = decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        with contextlib.suppress(msgspec.DecodeError, ValueError, RecursionError):
            _check(_version_decoder.decode(data).schema)
        raise UnreadableMessageError(f"unreadable: {error}") from error
    _check(message.schema)
    return message


def _check(schema: int) -> None:
    if not OLDEST <= schema <= SCHEMA:
        which = str(SCHEMA) if OLDEST == SCHEMA else f"{OLDEST} to {SCHEMA}"
        raise IncompatibleVersionError(
            f"the message has schema {schema} and this process reads {which}: run the same version everywhere"
        )
