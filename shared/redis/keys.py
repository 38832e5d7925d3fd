"""Every key that we keep in Redis: its type, its owner, its time to live.

Braces are Redis Cluster hash tags: the keys that one Lua call touches share a tag, so they sit on one slot.
A key's owner is the only role that creates and deletes it. `DOCUMENTED` is what the key-leak test and
docs/redis.md are checked against.
"""

from typing import NamedTuple

PREFIX = "parallm"
GROUP = "workers"  # the consumer group on every sequence stream
HANDED_BACK = "~handed-back"  # in a worker's place: sequences taken from a dead or leaving worker, claimed first
SUSPECTS = "~suspects"  # in a worker's place: sequences that have killed workers, run alone

DAY_S = 86_400
SEQUENCE_TTL_S = 3_600  # of a finished sequence and its log
REGISTRY_TTL_S = 7 * DAY_S  # model cards and tokenizers outlive their workers
WORKER_TTL_S = 10  # refreshed by each heartbeat
API_TTL_S = 60  # of an api's heartbeat and frame stream
JOB_TTL_S = 7 * DAY_S  # from its last change
FILE_UPLOAD_TTL_S = 3_600  # of bytes without a description: a torn upload
FILES_TTL_S = 30 * DAY_S  # the longest that a file may live
BATCH_TTL_S = 8 * DAY_S  # a day longer than the longest completion window
BATCH_LEASE_MS = 4_000  # renewed every second; losing it too early only costs doing the same again
IDEMPOTENCY_TTL_S = DAY_S
REQUEST_TTL_S = SEQUENCE_TTL_S
PAUSE_TTL_S = DAY_S  # refreshed by every worker that looks
WARM_EPOCH_S = 300  # hints of warm prefixes go after one to two of these
ADAPTER_TTL_S = 30 * DAY_S  # from the last publish of an adapter, or its last use by a worker
ADAPTER_COUNTER_TTL_S = 730 * DAY_S  # its version numbers stand in trajectories that outlive it
ADAPTER_UPLOAD_TTL_S = 600  # of bytes without a manifest: a torn publish
TRAIN_TTL_S = 30 * DAY_S  # of what a run tells of itself, from its last word
TRAINER = "trainer"  # consumer of a policy's orders: the next trainer takes over what the last one had not finished
TRAINER_TTL_S = 6  # refreshed by the trainer while it lives
COLLECTED_TTL_S = 7 * DAY_S  # of trajectories that nobody has learned from, from the last one
ORDER_TTL_S = DAY_S  # of orders that no trainer takes
ANSWER_TTL_S = 600
METRICS_TTL_S = 30 * DAY_S  # of the totals, from the last write of any process
METRICS_PROCESS_TTL_S = DAY_S
HISTORY_TTL_S = DAY_S


class KeyKind(NamedTuple):
    """One documented family of keys; `pattern` is a redis-cli glob."""

    pattern: str
    type: str
    owner: str
    ttl: str
    meaning: str


def queue(model: str, sequence_class: str, worker: str = "") -> str:
    """Stream of waiting and leased sequences of one class; with `worker`: those with affinity to it.

    In the worker's place may stand HANDED_BACK or SUSPECTS.
    """
    suffix = f":{worker}" if worker else ""
    return f"{PREFIX}:{{{model}}}:queue:{sequence_class}{suffix}"


def suspect_turn(model: str) -> str:
    """String: the worker that runs empty in order to run a suspect alone."""
    return f"{PREFIX}:{{{model}}}:suspect-turn"


def reap_turn(model: str) -> str:
    """String: the worker that looked for dead workers' sequences last; there for as long as none need look again."""
    return f"{PREFIX}:{{{model}}}:reap-turn"


def sequence(model: str, seq: str) -> str:
    """Hash of one sequence: spec, state, attempt, deaths, worker, api, cancel, deadline, stream and entry."""
    return f"{PREFIX}:{{{model}}}:seq:{seq}"


def sequence_log(model: str, seq: str) -> str:
    """Stream of log chunks: every token of a sequence, for resume and takeover."""
    return f"{PREFIX}:{{{model}}}:out:{seq}"


def finished(model: str, job: str) -> str:
    """Stream of the finished sequences of a job, until the job runner has recorded them."""
    return f"{PREFIX}:{{{model}}}:finished:{job}"


def dead_letters(model: str) -> str:
    """Stream of sequences that killed their workers, or could not be read."""
    return f"{PREFIX}:{{{model}}}:deadletters"


def worker(model: str, worker_id: str) -> str:
    """Hash of one worker's heartbeat."""
    return f"{PREFIX}:{{{model}}}:worker:{worker_id}"


def workers(model: str) -> str:
    """Sorted set of worker ids by last heartbeat."""
    return f"{PREFIX}:{{{model}}}:workers"


def warm_prefixes(model: str, epoch: int) -> str:
    """Hash: hash of a prompt's beginning -> the worker that computed it last, in one epoch."""
    return f"{PREFIX}:{{{model}}}:warm:{epoch}"


def pause() -> str:
    """String: JSON of the pause in force, for the workers of all models."""
    return f"{PREFIX}:pause"


def models() -> str:
    """Sorted set of model names by last heartbeat of any of their workers."""
    return f"{PREFIX}:models"


def model_card(model: str) -> str:
    """String: JSON of the model's card."""
    return f"{PREFIX}:{{{model}}}:model"


def tokenizer(sha256: str) -> str:
    """String: JSON of a tokenizer bundle, named by its hash."""
    return f"{PREFIX}:tokenizer:{sha256}"


def frames(api: str) -> str:
    """Stream of an api process's frames: what makes the live channel of the same name lossless."""
    return f"{PREFIX}:api:{{{api}}}:frames"


def frame_channel(api: str) -> str:
    """Pub/sub channel of an api process's frames."""
    return f"{PREFIX}:api:{{{api}}}:live"


def api(api_id: str) -> str:
    """Hash of one api process's heartbeat."""
    return f"{PREFIX}:api:{{{api_id}}}"


def control_channel(worker_id: str) -> str:
    """Pub/sub channel on which a worker hears cancel and route messages."""
    return f"{PREFIX}:ctl:{worker_id}"


def request(request_id: str) -> str:
    """Hash of a streamed request: what another api process needs to resume it."""
    return f"{PREFIX}:request:{request_id}"


def job(job_id: str) -> str:
    """Hash of one job: spec, state, counts, cursor."""
    return f"{PREFIX}:job:{{{job_id}}}"


def job_inputs(job_id: str) -> str:
    """List of a job's input lines (JSON), one a prompt."""
    return f"{PREFIX}:job:{{{job_id}}}:inputs"


def job_results(job_id: str, chunk: int) -> str:
    """Hash ordinal -> trajectory (JSON), RESULTS_PER_CHUNK ordinals a key."""
    return f"{job_results_prefix(job_id)}{chunk}"


def job_results_prefix(job_id: str) -> str:
    """What the keys of a job's result chunks begin with; the chunk's number follows."""
    return f"{PREFIX}:job:{{{job_id}}}:results:"


def job_lease(job_id: str) -> str:
    """String: the runner whose tick advances the job right now."""
    return f"{PREFIX}:job:{{{job_id}}}:lease"


def jobs() -> str:
    """Sorted set of job ids by creation time."""
    return f"{PREFIX}:jobs"


def active_jobs() -> str:
    """Sorted set of the ids of jobs not yet terminal, by creation time."""
    return f"{PREFIX}:jobs:active"


def job_idempotency(key: str) -> str:
    """String: the id of the job that was submitted under this idempotency key."""
    return f"{PREFIX}:idem:job:{key}"


def file(file_id: str) -> str:
    """String: JSON of a file's name, size and purpose; it is there when all of its bytes are."""
    return f"{PREFIX}:file:{{{file_id}}}"


def file_bytes(file_id: str) -> str:
    """Hash chunk number -> bytes of a file."""
    return f"{file(file_id)}:bytes"


def files() -> str:
    """Sorted set of file ids by creation time."""
    return f"{PREFIX}:files"


def batch(batch_id: str) -> str:
    """Hash of one batch: spec, state, job, errors, times."""
    return f"{PREFIX}:batch:{{{batch_id}}}"


def batch_lease(batch_id: str) -> str:
    """String: the api process that checks the batch's lines, or writes its files, right now."""
    return f"{batch(batch_id)}:lease"


def batches() -> str:
    """Sorted set of batch ids by creation time."""
    return f"{PREFIX}:batches"


def pending_batches() -> str:
    """Sorted set of the ids of batches not yet terminal, by creation time."""
    return f"{PREFIX}:batches:pending"


def adapters() -> str:
    """Sorted set of adapter names by last publish."""
    return f"{PREFIX}:adapters"


def adapter(name: str) -> str:
    """Hash of one adapter's pointers: latest, high, best, best_value, base."""
    return f"{PREFIX}:adapter:{{{name}}}"


def adapter_counter(name: str) -> str:
    """String: the last version number given out; it outlives the adapter, so that no number comes twice."""
    return f"{adapter(name)}:counter"


def adapter_versions(name: str) -> str:
    """Sorted set of an adapter's versions."""
    return f"{adapter(name)}:versions"


def adapter_manifest(name: str, version: int | str) -> str:
    """String: JSON of one version's manifest; with version "": what these keys begin with."""
    return f"{adapter(name)}:manifest:{version}"


def adapter_bytes(name: str, version: int | str) -> str:
    """Hash chunk number -> bytes of one version; with version "": what these keys begin with."""
    return f"{adapter(name)}:bytes:{version}"


def adapter_pins(name: str) -> str:
    """Sorted set "<version>:<owner>" by the end of the pin, in Unix milliseconds."""
    return f"{adapter(name)}:pins"


def adapter_acks(name: str) -> str:
    """Hash worker id -> "<version> <Unix milliseconds>": what each worker has loaded."""
    return f"{adapter(name)}:acks"


def adapter_log(name: str) -> str:
    """Stream of the moves of `latest`: version, previous, reason."""
    return f"{adapter(name)}:log"


def adapter_channel() -> str:
    """Pub/sub channel of changes of all adapters."""
    return f"{PREFIX}:adapters:events"


def collected(model: str) -> str:
    """Stream of settled sequences that are to become trajectories, until the job runner has scored them."""
    return f"{PREFIX}:{{{model}}}:collected"


def collected_stats(model: str) -> str:
    """Hash: entries added to and dropped from `collected`, and the bytes in it."""
    return f"{collected(model)}:stats"


def trainings() -> str:
    """Sorted set of the policies that were ever trained, by their trainer's last heartbeat."""
    return f"{PREFIX}:train"


def training(policy: str) -> str:
    """Hash: what the trainer of a policy says of itself (`shared.training.TrainerStatus`)."""
    return f"{PREFIX}:train:{{{policy}}}"


def trainer_alive(policy: str) -> str:
    """String: the trainer that owns the policy; there is one at a time."""
    return f"{training(policy)}:alive"


def training_steps(policy: str) -> str:
    """Stream of the last train steps, one entry each (`shared.training.TrainingPoint`): the curves."""
    return f"{training(policy)}:steps"


def training_alerts(policy: str) -> str:
    """Stream of the last alerts: kind, message."""
    return f"{training(policy)}:alerts"


def alert_channel() -> str:
    """Pub/sub channel of the alerts of all trainers."""
    return f"{PREFIX}:alerts"


def trajectories(policy: str) -> str:
    """Stream of scored trajectories from live traffic, until a checkpoint of the trainer has learned from them."""
    return f"{training(policy)}:trajectories"


def trajectory_stats(policy: str) -> str:
    """Hash: trajectories collected, dropped and consumed, and the bytes that wait."""
    return f"{trajectories(policy)}:stats"


def trajectories_seen(policy: str) -> str:
    """Sorted set of the ids of collected trajectories, by time: none is collected twice."""
    return f"{trajectories(policy)}:seen"


def training_orders(policy: str) -> str:
    """Stream of what users ask of the trainer: an update, a checkpoint."""
    return f"{training(policy)}:orders"


def score_orders() -> str:
    """Stream of texts that a job runner is to score at once."""
    return f"{PREFIX}:score:orders"


def answer(order_id: str) -> str:
    """String: the answer to an order, JSON."""
    return f"{PREFIX}:answer:{order_id}"


def metric_totals() -> str:
    """Hash metric field -> number: what all processes have counted, dead ones included."""
    return f"{PREFIX}:{{metrics}}:totals"


def process_metrics(process_id: str) -> str:
    """Hash metric field -> number: what one process has told of its counts, and its role."""
    return f"{PREFIX}:{{metrics}}:process:{process_id}"


def rate_limits() -> str:
    """What the keys of the rate counters begin with; the rest is the library's."""
    return f"{PREFIX}:limit"


def history() -> str:
    """Stream of the ring's samples of the last hour: the dashboard's curves."""
    return f"{PREFIX}:{{metrics}}:history"


def history_turn() -> str:
    """String: the api process that took the last sample."""
    return f"{PREFIX}:{{metrics}}:history-turn"


RESULTS_PER_CHUNK = 256

DOCUMENTED: tuple[KeyKind, ...] = (
    KeyKind("parallm:{*}:queue:interactive", "stream", "api", "7 d, refreshed", "waiting and leased sequences"),
    KeyKind("parallm:{*}:queue:batch", "stream", "job runner", "7 d, refreshed", "waiting and leased sequences"),
    KeyKind(
        "parallm:{*}:queue:*:*", "stream", "worker", "7 d, refreshed", "affinity to a worker; ~handed-back, ~suspects"
    ),
    KeyKind("parallm:{*}:suspect-turn", "string", "worker", "5 s", "which worker runs empty for a suspect"),
    KeyKind("parallm:{*}:reap-turn", "string", "worker", "a twelfth of a lease", "who looked for dead workers last"),
    KeyKind("parallm:{*}:seq:*", "hash", "api or job runner", "1 h after its end", "one sequence's state"),
    KeyKind("parallm:{*}:out:*", "stream", "worker", "1 h after its end", "one sequence's tokens, in chunks"),
    KeyKind("parallm:{*}:finished:*", "stream", "job runner", "7 d", "results that no tick has recorded yet"),
    KeyKind("parallm:{*}:deadletters", "stream", "worker", "7 d, 1,000 entries", "sequences and messages given up"),
    KeyKind("parallm:{*}:worker:*", "hash", "worker", "10 s", "heartbeat"),
    KeyKind("parallm:{*}:workers", "sorted set", "worker", "7 d", "worker ids by heartbeat"),
    KeyKind("parallm:{*}:warm:*", "hash", "worker", "10 min, bounded", "which worker computed which prefix last"),
    KeyKind("parallm:pause", "string", "api", "1 d, refreshed", "the pause in force, JSON"),
    KeyKind("parallm:models", "sorted set", "worker", "7 d", "model names by heartbeat"),
    KeyKind("parallm:{*}:model", "string", "worker", "7 d", "model card, JSON"),
    KeyKind("parallm:tokenizer:*", "string", "worker", "7 d", "tokenizer bundle, JSON, by sha256"),
    KeyKind("parallm:api:{*}", "hash", "api", "60 s", "heartbeat"),
    KeyKind("parallm:api:{*}:frames", "stream", "worker", "60 s, bounded", "token frames of one api process"),
    KeyKind("parallm:request:*", "hash", "api", "1 h", "how to resume a streamed request"),
    KeyKind("parallm:job:{*}", "hash", "api", "7 d", "one job's spec, state, counts"),
    KeyKind("parallm:job:{*}:inputs", "list", "api", "7 d", "input lines, JSON"),
    KeyKind("parallm:job:{*}:results:*", "hash", "job runner", "7 d", "trajectories, JSON, by ordinal"),
    KeyKind("parallm:job:{*}:lease", "string", "job runner", "10 s", "which runner advances the job"),
    KeyKind("parallm:jobs", "sorted set", "api", "7 d", "job ids by creation"),
    KeyKind("parallm:jobs:active", "sorted set", "api", "7 d", "ids of jobs not yet terminal"),
    KeyKind("parallm:idem:job:*", "string", "api", "1 d", "idempotency key -> job id"),
    KeyKind("parallm:file:{*}", "string", "api", "the file's; 7 d unless asked", "one file's description, JSON"),
    KeyKind("parallm:file:{*}:bytes", "hash", "api", "the file's; 1 h while it is written", "its bytes in chunks"),
    KeyKind("parallm:files", "sorted set", "api", "30 d, refreshed", "file ids by creation"),
    KeyKind("parallm:batch:{*}", "hash", "api", "8 d, refreshed", "one batch's spec, state, errors, times"),
    KeyKind("parallm:batch:{*}:lease", "string", "api", "4 s", "which api process checks lines or writes files"),
    KeyKind("parallm:batches", "sorted set", "api", "8 d, refreshed", "batch ids by creation"),
    KeyKind("parallm:batches:pending", "sorted set", "api", "8 d, refreshed", "ids of batches not yet terminal"),
    KeyKind("parallm:adapters", "sorted set", "publisher", "30 d, refreshed", "adapter names by last publish"),
    KeyKind("parallm:adapter:{*}", "hash", "publisher", "30 d, refreshed", "pointers of one adapter"),
    KeyKind("parallm:adapter:{*}:counter", "string", "publisher", "730 d", "last version number given out"),
    KeyKind("parallm:adapter:{*}:versions", "sorted set", "publisher", "30 d, refreshed", "versions that exist"),
    KeyKind("parallm:adapter:{*}:manifest:*", "string", "publisher", "30 d from use", "one version, JSON"),
    KeyKind("parallm:adapter:{*}:bytes:*", "hash", "publisher", "30 d from use; torn: 10 min", "safetensors in chunks"),
    KeyKind("parallm:adapter:{*}:pins", "sorted set", "api or worker", "its last pin's", "who keeps which version"),
    KeyKind("parallm:adapter:{*}:acks", "hash", "worker", "30 d", "which worker has loaded which version"),
    KeyKind("parallm:adapter:{*}:log", "stream", "publisher", "30 d, 1,000 entries", "every move of latest"),
    KeyKind("parallm:{*}:collected", "stream", "worker", "7 d, bounded", "settled sequences to be scored"),
    KeyKind("parallm:{*}:collected:stats", "hash", "worker", "7 d", "added, dropped, bytes of `collected`"),
    KeyKind("parallm:train", "sorted set", "trainer", "30 d", "policies by their trainer's heartbeat"),
    KeyKind("parallm:train:{*}", "hash", "trainer", "30 d", "what the trainer says of itself; counts of alerts"),
    KeyKind("parallm:train:{*}:alive", "string", "trainer", "6 s", "the trainer that owns the policy"),
    KeyKind("parallm:train:{*}:steps", "stream", "trainer", "30 d, 4,096 entries", "train steps: the curves"),
    KeyKind("parallm:train:{*}:alerts", "stream", "trainer", "30 d, 256 entries", "alerts"),
    KeyKind("parallm:train:{*}:trajectories", "stream", "job runner", "7 d, bounded", "live trajectories, JSON"),
    KeyKind("parallm:train:{*}:trajectories:stats", "hash", "job runner", "7 d", "counts, and bytes that wait"),
    KeyKind("parallm:train:{*}:trajectories:seen", "sorted set", "job runner", "7 d", "ids, so that none comes twice"),
    KeyKind("parallm:train:{*}:orders", "stream", "api", "1 d, 32 entries", "updates and checkpoints asked for"),
    KeyKind("parallm:score:orders", "stream", "api", "1 d, 256 entries", "texts to be scored at once"),
    KeyKind("parallm:answer:*", "string", "trainer or job runner", "10 min", "the answer to an order, JSON"),
    KeyKind("parallm:{metrics}:totals", "hash", "any process", "30 d, refreshed", "counts of all processes, summed"),
    KeyKind("parallm:{metrics}:process:*", "hash", "that process", "1 d, refreshed", "what it has told of its counts"),
    KeyKind("parallm:limit:*", "string", "api", "twice its window", "requests of one API key, by name, in one window"),
    KeyKind("parallm:{metrics}:history", "stream", "api", "1 d, 720 entries", "samples of the last hour: curves"),
    KeyKind("parallm:{metrics}:history-turn", "string", "api", "4.5 s", "which api process has sampled last"),
    KeyKind("arq:*", "various", "job runner", "arq's own; 1 d at most", "arq's queue, jobs and results"),
)
