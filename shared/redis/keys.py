"""The names of all keys and channels in Redis, and how long keys live; key_table.py says what they are.

Braces are Redis Cluster hash tags: the keys that one Lua call touches share a tag, so they sit on one slot.
"""

import hashlib

PREFIX = "parallm"
GROUP = "workers"  # the consumer group on every sequence stream
HANDED_BACK = "~handed-back"  # in a worker's place: sequences taken from a dead or leaving worker, claimed first
SUSPECTS = "~suspects"  # in a worker's place: sequences that have killed workers, run alone

DAY_S = 86_400
SEQUENCE_TTL_S = 3_600  # of a finished sequence and its log
REGISTRY_TTL_S = 7 * DAY_S  # model cards and tokenizers outlive their workers
WORKER_TTL_S = 10  # refreshed by each heartbeat
CHILD_TROUBLES_TTL_S = 30  # told again while they last
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
RING_ID_TTL_S = 730 * DAY_S  # from the last start of a trainer
TRAIN_TTL_S = 30 * DAY_S  # of what a run tells of itself, from its last word
TRAINER = "trainer"  # consumer of a policy's orders: the next trainer takes over what the last one had not finished
TRAINER_TTL_S = 6  # refreshed by the trainer while it lives
COLLECTED_TTL_S = 7 * DAY_S  # of trajectories that nobody has learned from, from the last one
ORDER_TTL_S = DAY_S  # of orders that no trainer takes
ANSWER_TTL_S = 600
METRICS_TTL_S = 30 * DAY_S  # of the totals, from the last write of any process
METRICS_PROCESS_TTL_S = DAY_S
HISTORY_TTL_S = DAY_S
RESULTS_PER_CHUNK = 256  # of a job, in one hash


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


def child_troubles() -> str:
    """Hash of whoever runs children -> JSON of those that end again and again."""
    return f"{PREFIX}:children"


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
    """Pub/sub channel on which a worker hears of cancelled and moved sequences, pauses and cache resets."""
    return f"{PREFIX}:ctl:{worker_id}"


def request(request_id: str) -> str:
    """Hash of a streamed request: what another api process needs to resume it."""
    return f"{PREFIX}:request:{request_id}"


def named_requests(owner: str, name: str) -> str:
    """Set: model and id of the requests that go by this name of an API key's, while they run."""
    digest = hashlib.sha256(b"%s\n%s" % (owner.encode(), name.encode())).hexdigest()
    return f"{PREFIX}:named:{digest[:32]}"


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


def jobs(tenant: str = "") -> str:
    """Sorted set of job ids by creation time: of all, or of one tenant."""
    return f"{PREFIX}:jobs:of:{tenant}" if tenant else f"{PREFIX}:jobs"


def active_jobs() -> str:
    """Sorted set of the ids of jobs not yet terminal, by creation time."""
    return f"{PREFIX}:jobs:active"


def job_idempotency(key: str, tenant: str = "") -> str:
    """String: the id of the job that was submitted under this idempotency key; each tenant has keys of its own."""
    return f"{PREFIX}:idem:job:{tenant}:{key}" if tenant else f"{PREFIX}:idem:job:{key}"


def file(file_id: str) -> str:
    """String: JSON of a file's name, size and purpose; it is there when all of its bytes are."""
    return f"{PREFIX}:file:{{{file_id}}}"


def file_bytes(file_id: str) -> str:
    """Hash chunk number -> bytes of a file."""
    return f"{file(file_id)}:bytes"


def files(tenant: str = "") -> str:
    """Sorted set of file ids by creation time: of all, or of one tenant."""
    return f"{PREFIX}:files:of:{tenant}" if tenant else f"{PREFIX}:files"


def batch(batch_id: str) -> str:
    """Hash of one batch: spec, state, job, errors, times."""
    return f"{PREFIX}:batch:{{{batch_id}}}"


def batch_lease(batch_id: str) -> str:
    """String: the api process that checks the batch's lines, or writes its files, right now."""
    return f"{batch(batch_id)}:lease"


def batches(tenant: str = "") -> str:
    """Sorted set of batch ids by creation time: of all, or of one tenant."""
    return f"{PREFIX}:batches:of:{tenant}" if tenant else f"{PREFIX}:batches"


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


def ring_id() -> str:
    """String: a random name of this ring's data, by which a run knows whether it has been trained here."""
    return f"{PREFIX}:train:ring"


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
