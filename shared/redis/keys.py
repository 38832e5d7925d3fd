"""Every key and channel in Redis: its name, its type, its owner, its time to live, its meaning.

A key's owner is the only role that creates and deletes it. The tests of leaked keys, docs/operate/redis.md and
docs/reference/keys.md follow this table. Braces are Redis Cluster hash tags: the keys that one Lua call touches share
a tag, so they sit on one slot. Those of a model have the model for their tag, a job, an adapter, a policy, a batch, a
file, a learner, a keeper and an api process each its own; keys without one are used alone. A channel with a tag is a
sharded one in a cluster (shared/redis/connection/routing.py).
"""

import functools
import hashlib

GROUP = "workers"  # the consumer group on every sequence stream
HANDED_BACK = "~handed-back"  # in a worker's place: sequences taken from a dead or leaving worker, claimed first
HOSTS = "~hosts"  # in a worker's place, on the control channel: all hosts
SUSPECTS = "~suspects"  # in a worker's place: sequences whose workers have died twice, run apart from all others

DAY_S = 86_400
SEQUENCE_TTL_S = 3_600  # of a finished sequence and its log
REGISTRY_TTL_S = 7 * DAY_S  # model cards and tokenizers outlive their workers
WORKER_TTL_S = 10  # refreshed by each heartbeat
CATALOGUE_TTL_S = 730 * DAY_S  # from the last change of any entry, or the last heartbeat of any host
HOST_TTL_S = 10  # refreshed by each heartbeat
LOAD_LEASE_MS = 10_000  # renewed by each heartbeat of the host that loads
MODEL_ORDER_TTL_S = 600
CHILD_TROUBLES_TTL_S = 30  # told again while they last
COURT_TTL_S = 3_600  # of sequences that wait to be checked
VERDICTS_TTL_S = DAY_S  # from the last check
API_TTL_S = 60  # of an api's heartbeat and frame stream
API_LEFT_S = 15  # of the heartbeat of an api that has stopped: its streams wait for their clients
JOB_TTL_S = 7 * DAY_S  # from its last change
FILE_UPLOAD_TTL_S = 3_600  # of bytes without a description: a torn upload
FILES_TTL_S = 30 * DAY_S  # the longest that a file may live
BATCH_TTL_S = 8 * DAY_S  # a day longer than the longest completion window
KEPT_EVENTS_TTL_S = DAY_S  # while they are written
DUE_TTL_S = 8 * DAY_S  # of a list of what is due, from its last change
BACKGROUND_LEASE_MS = 12_000  # far below API_TTL_S, after which a worker takes nobody for the reader
BATCH_LEASE_MS = 4_000  # renewed every second; losing it too early only costs doing the same again
IDEMPOTENCY_TTL_S = DAY_S
REQUEST_TTL_S = SEQUENCE_TTL_S
PEER_SECRET_TTL_S = DAY_S  # refreshed with every heartbeat of a worker that transfers KV
GROUP_TTL_S = 10  # while ranks look for one another
KV_FOLDER_TTL_S = 600  # of whose files a worker shares; as long as its hints of warm prefixes
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
LEARNER_TTL_S = 7 * DAY_S  # of a learner and its state, from its last request
LEARNER_SAVE_TTL_S = 30 * DAY_S  # the longest that a save is kept
LEARNER_ANSWER_TTL_S = 3_600
TINKER_TTL_S = 7 * DAY_S  # of sessions and samplers, from their last use
SAMPLE_TTL_S = 3_600
TINKER_DOWNLOAD_TTL_S = 900  # of the address of a checkpoint
LEARNER_LEASE_MS = 6_000  # a service that dies leaves its learners to another one after this long
LEARNER_SERVICE_TTL_S = 10  # refreshed by each heartbeat
SHARED_RUN_TTL_S = 10  # refreshed by its leader
SHARED_WORDS_TTL_S = 3_600  # from the last one
ROUNDS_TTL_S = 7 * DAY_S  # of the average of several runs, from its last round
RESULTS_PER_CHUNK = 256  # of a job, in one hash


class Name:
    """Name of a key or a channel: `pattern` is a redis-cli glob, and a call puts values in the place of its stars."""

    __slots__ = ("_template", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._template = pattern.replace("*", "%s")

    def __call__(self, *values: str | int) -> str:
        return self._template % values


class Key(Name):
    """One documented family of keys."""

    __slots__ = ("meaning", "owner", "ttl", "type")

    def __init__(self, pattern: str, type: str, owner: str, ttl: str, meaning: str) -> None:
        super().__init__(pattern)
        self.type, self.owner, self.ttl, self.meaning = type, owner, ttl, meaning
        _documented.append(self)


_documented: list[Key] = []


# -- queues and sequences, of one model

_queue = Name("parallm:{*}:queue:*")
_interactive_queue = Key(
    "parallm:{*}:queue:interactive", "stream", "api", "7 d, refreshed", "waiting and leased sequences"
)
_batch_queue = Key("parallm:{*}:queue:batch", "stream", "job runner", "7 d, refreshed", "waiting and leased sequences")
_queue_of = Key("parallm:{*}:queue:*:*", "stream", "worker", "7 d, refreshed", "for a worker; ~handed-back, ~suspects")


@functools.lru_cache(maxsize=4096)  # every claim names many, again and again
def queue(model: str, sequence_class: str, worker: str = "") -> str:
    """The queue of one class; with `worker`: of those with affinity to it, or HANDED_BACK, or SUSPECTS."""
    return _queue_of(model, sequence_class, worker) if worker else _queue(model, sequence_class)


suspect_turn = Key("parallm:{*}:suspect-turn", "string", "worker", "5 s", "which worker runs empty for suspects")
reap_turn = Key("parallm:{*}:reap-turn", "string", "worker", "a twelfth of a lease", "who looked for dead workers last")
# Fields: spec, state, attempt, deaths, worker, api, cancel, deadline, stream, entry, kv_at (last owner), party, beside
sequence = Key("parallm:{*}:seq:*", "hash", "api or job runner", "1 h after its end", "one sequence's state")
sequence_log = Key("parallm:{*}:out:*", "stream", "worker", "1 h after its end", "one sequence's tokens, in chunks")
finished = Key("parallm:{*}:finished:*", "stream", "job runner", "7 d", "results that no tick has recorded yet")
# Fields: spec, result (msgpack)
recording = Key("parallm:{*}:recording:*", "hash", "worker", "--record-ttl-s", "an ended sequence, to be replayed")
recordings = Key(
    "parallm:{*}:recordings", "sorted set", "worker", "as the newest", "size and id of recordings, by time"
)
recordings_stats = Key("parallm:{*}:recordings:stats", "hash", "worker", "as the newest", "bytes of the recordings")
court = Key("parallm:{*}:court", "stream", "worker", "1 h, bounded", "ended sequences that other workers are to check")
court_stats = Key("parallm:{*}:court:stats", "hash", "worker", "1 h", "counts of these")
verdicts = Key(
    "parallm:{*}:verdicts:*", "hash", "worker", "1 d, refreshed", "how other workers found a worker's tokens"
)
dead_letters = Key(
    "parallm:{*}:deadletters", "stream", "worker", "7 d, 1,000 entries", "sequences and messages given up"
)

# -- workers and models

worker = Key("parallm:{*}:worker:*", "hash", "worker", "10 s", "heartbeat")
workers = Key("parallm:{*}:workers", "sorted set", "worker", "7 d", "worker ids by heartbeat")
weights = Key("parallm:{*}:weights", "sorted set", "worker", "10 s", "what live workers compute with, by heartbeat")
# Of a large ring, so that not every process has to look at each heartbeat
live_workers = Key("parallm:{*}:live:ids", "string", "worker", "1 s", "ids of live workers, as one of them saw it")
live_statuses = Key(
    "parallm:{*}:live:statuses", "string", "api", "1 s", "live workers' heartbeats, as one api saw them"
)
live_turn = Key("parallm:{*}:live-turn:*", "string", "worker or api", "1 s", "who looks for the others")
# One hash an epoch: hash of a prompt's beginning -> worker
warm_prefixes = Key(
    "parallm:{*}:warm:*", "hash", "worker", "10 min, bounded", "which worker computed which prefix last"
)
# 32 random bytes. Its name begins in another way than all others, so that no pattern of another role's reads it
peer_secret = Key(
    "parallm-peers:secret", "string", "worker", "1 d, refreshed", "by which workers that transfer KV know one another"
)
# Of a group of ranks that are one worker: by its name and the rank
group_member = Key(
    "parallm-peers:group:*:member:*", "string", "worker", "10 s, refreshed", "a rank that looks for its group, msgpack"
)
group_meeting = Key(
    "parallm-peers:group:*:meeting", "string", "worker", "10 s, refreshed", "where rank 0 waits for whom, msgpack"
)
# Likewise of ranks that are one trainer: a worker's are not for its role
trainer_secret = Key("parallm-ranks:secret", "string", "trainer", "1 d, refreshed", "by which they know one another")
trainer_member = Key(
    "parallm-ranks:group:*:member:*", "string", "trainer", "10 s, refreshed", "a rank that looks for its group, msgpack"
)
trainer_meeting = Key(
    "parallm-ranks:group:*:meeting", "string", "trainer", "10 s, refreshed", "where rank 0 waits for whom, msgpack"
)
# It outlives the worker, whose files others may have
kv_folder = Key(
    "parallm:{*}:kv-folder:*", "string", "worker", "10 min, refreshed", "id of the folder of KV that a worker writes to"
)
pause = Key("parallm:pause", "string", "api", "1 d, refreshed", "the pause in force, JSON")
child_troubles = Key(
    "parallm:children", "hash", "serve", "30 s, refreshed", "child processes that end again and again, JSON"
)
models = Key("parallm:models", "sorted set", "worker", "7 d", "model names by heartbeat")
model_card = Key("parallm:{*}:model", "string", "worker", "7 d", "model card, JSON")
tokenizer = Key("parallm:tokenizer:*", "string", "worker", "7 d", "tokenizer bundle, JSON, by sha256")
# The catalogue of models, and the hosts that load them
catalogue = Key("parallm:{catalogue}:entries", "hash", "api or worker", "730 d, refreshed", "models by name, JSON")
model_aliases = Key(
    "parallm:{catalogue}:aliases", "hash", "api or worker", "730 d, refreshed", "alias -> name of its model"
)
model_figures = Key(
    "parallm:{catalogue}:figures",
    "hash",
    "worker",
    "730 d, refreshed",
    "what a host has found in a model's files, JSON",
)
model_loads = Key(
    "parallm:{catalogue}:loads", "hash", "worker", "730 d, refreshed", "how many loads of a model have begun"
)
model_orders = Key(
    "parallm:{catalogue}:orders", "hash", "api", "10 min from the last one", "loads and unloads asked for, JSON"
)
host = Key("parallm:{catalogue}:host:*", "string", "worker", "10 s", "heartbeat of a host, JSON")
hosts = Key("parallm:{catalogue}:hosts", "sorted set", "worker", "7 d, refreshed", "host ids by heartbeat")
loading = Key("parallm:{catalogue}:loading:*", "string", "worker", "10 s", "id of the host that loads a model")
# A worker hears here of cancelled and moved sequences, pauses and cache resets; HOSTS of models that are asked for
control_channel = Name("parallm:ctl:*")

# -- api processes and requests

api = Key("parallm:api:{*}", "hash", "api", "60 s", "heartbeat")
# It makes the live channel beside it lossless
frames = Key("parallm:api:{*}:frames", "stream", "worker", "60 s, bounded", "token frames of one api process")
frame_channel = Name("parallm:api:{*}:live")
request = Key("parallm:request:*", "hash", "api", "1 h", "how to resume a streamed request")
_named = Key("parallm:named:*", "set", "api", "1 h, refreshed", "requests by the name that their client gave them")


def named_requests(owner: str, name: str) -> str:
    """Model and id of the requests that go by this name of an API key's, while they run."""
    return _named(hashlib.sha256(b"%s\n%s" % (owner.encode(), name.encode())).hexdigest()[:32])


# -- jobs

job = Key("parallm:job:{*}", "hash", "api", "7 d", "one job's spec, state, counts")
job_inputs = Key("parallm:job:{*}:inputs", "list", "api", "7 d", "input lines, JSON")
job_images = Key("parallm:job:{*}:images", "hash", "api", "7 d", "images of its prompts, by their SHA-256")
# By job and chunk, RESULTS_PER_CHUNK ordinals a hash; with the chunk "": what these keys begin with
job_results = Key("parallm:job:{*}:results:*", "hash", "job runner", "7 d", "trajectories, JSON, by ordinal")
job_order = Key("parallm:job:{*}:order", "list", "job runner", "7 d", "ordinals as they were recorded")
job_lease = Key("parallm:job:{*}:lease", "string", "job runner", "10 s", "which runner advances the job")
_jobs = Key("parallm:jobs", "sorted set", "api", "7 d", "job ids by creation")
_jobs_of = Key("parallm:jobs:of:*", "sorted set", "api", "7 d", "job ids of one tenant by creation")


def jobs(tenant: str = "") -> str:
    """The jobs of all, or of one tenant."""
    return _jobs_of(tenant) if tenant else _jobs()


active_jobs = Key("parallm:jobs:active", "sorted set", "api", "7 d", "ids of jobs not yet settled")
_job_idempotency = Key("parallm:idem:job:*", "string", "api", "1 d", "idempotency key -> job id")


def job_idempotency(key: str, tenant: str = "") -> str:
    """Each tenant has idempotency keys of its own."""
    return _job_idempotency(f"{tenant}:{key}" if tenant else key)


# -- files and batches

# It is there when all of the file's bytes are
file = Key("parallm:file:{*}", "string", "api", "the file's; 7 d unless asked", "one file's description, JSON")
file_bytes = Key("parallm:file:{*}:bytes", "hash", "api", "the file's; 1 h while it is written", "its bytes in chunks")
_files = Key("parallm:files", "sorted set", "api", "30 d, refreshed", "file ids by creation")
_tenant_files = Key("parallm:files:of:*", "sorted set", "api", "30 d, refreshed", "file ids of one tenant by creation")
batch = Key("parallm:batch:{*}", "hash", "api", "8 d, refreshed", "one batch's spec, state, errors, times")
batch_lease = Key("parallm:batch:{*}:lease", "string", "api", "4 s", "which api process checks lines or writes files")
_batches = Key("parallm:batches", "sorted set", "api", "8 d, refreshed", "batch ids by creation")
_tenant_batches = Key(
    "parallm:batches:of:*", "sorted set", "api", "8 d, refreshed", "batch ids of one tenant by creation"
)
pending_batches = Key(
    "parallm:batches:pending", "sorted set", "api", "8 d, refreshed", "ids of batches not yet terminal"
)


# -- responses and conversations, by who keeps them: a digest of the tenant's or API key's name (`keeper`)

_kept_ttl = "as the setting says; 7 d, from the last use"
# A response's fields: state, body, input, output, previous, ids, ...; a conversation's: body, next, ids, and its items
kept = Key("parallm:kept:{*}:thing:*", "hash", "api", _kept_ttl, "a response, conversation, answer or session")
kept_order = Key("parallm:kept:{*}:order:*", "sorted set", "api", _kept_ttl, "items in order, answers by time")
kept_events = Key(
    "parallm:kept:{*}:events:*", "stream", "api", "1 d; 1 h after its end", "what the stream of a response has said"
)
kept_uses = Key("parallm:kept:{*}:uses", "sorted set", "api", "a day longer", "what is stored, by its last use")
kept_sizes = Key("parallm:kept:{*}:sizes", "hash", "api", "a day longer", "bytes of each, and of `all`")
# Entries by the Unix milliseconds from which on they may be taken: background, webhooks, feedback, learners:MODEL
due = Key("parallm:{*}:due", "sorted set", "api or job runner", "8 d, refreshed", "what is to be done, and when")
due_owners = Key("parallm:{*}:due:owners", "hash", "api", "8 d, refreshed", "which process has taken which entry")
due_of = Key("parallm:{*}:due:of:*", "sorted set", "api or job runner", "8 d, refreshed", "a tenant's part of a list")
due_whose = Key("parallm:{*}:due:whose", "hash", "api or job runner", "8 d, refreshed", "whose part has an entry")
due_turns = Key("parallm:{*}:due:turns", "sorted set", "api", "8 d, refreshed", "whose entries are taken next")


def keeper(owner: str) -> str:
    """Whose responses and conversations these are, in names of keys."""
    return hashlib.sha256(owner.encode()).hexdigest()[:32]


def files(tenant: str = "") -> str:
    """All, or those of one tenant."""
    return _tenant_files(tenant) if tenant else _files()


def batches(tenant: str = "") -> str:
    """All, or those of one tenant."""
    return _tenant_batches(tenant) if tenant else _batches()


# -- adapters, by name; with the version "": what the keys of its versions begin with

adapters = Key("parallm:adapters", "sorted set", "publisher", "30 d, refreshed", "adapter names by last publish")
# Fields: latest, high, best, best_value, base
adapter = Key("parallm:adapter:{*}", "hash", "publisher", "30 d, refreshed", "pointers of one adapter")
# It outlives the adapter, so that no number comes twice
adapter_counter = Key("parallm:adapter:{*}:counter", "string", "publisher", "730 d", "last version number given out")
adapter_versions = Key(
    "parallm:adapter:{*}:versions", "sorted set", "publisher", "30 d, refreshed", "versions that exist"
)
adapter_manifest = Key("parallm:adapter:{*}:manifest:*", "string", "publisher", "30 d from use", "one version, JSON")
adapter_bytes = Key(
    "parallm:adapter:{*}:bytes:*", "hash", "publisher", "30 d from use; torn: 10 min", "safetensors in chunks"
)
# "<version>:<owner>" by the end of the pin, in Unix milliseconds
adapter_pins = Key(
    "parallm:adapter:{*}:pins", "sorted set", "api or worker", "its last pin's", "who keeps which version"
)
# Worker id -> "<version> <Unix milliseconds>"
adapter_acks = Key("parallm:adapter:{*}:acks", "hash", "worker", "30 d", "which worker has loaded which version")
# Fields: version, previous, reason
adapter_log = Key("parallm:adapter:{*}:log", "stream", "publisher", "30 d, 1,000 entries", "every move of latest")
# Fields: id, terms, versions, latest, most, all, verdict, moved; count, mean and squares of each version's rewards.
# Its name begins as those of the keys that a job runner may write
split = Key(
    "parallm:{*}:split", "hash", "api", "30 d from the last reward", "split of an adapter's requests over versions"
)
split_answers = Key(
    "parallm:{*}:split:answers", "set", "job runner", "30 d; until the verdict", "answers whose reward it has counted"
)
adapter_channel = Name("parallm:adapters:events")

# -- training, by policy

collected = Key("parallm:{*}:collected", "stream", "worker", "7 d, bounded", "settled sequences to be scored")
collected_stats = Key("parallm:{*}:collected:stats", "hash", "worker", "7 d", "added, dropped, bytes of `collected`")
trainings = Key("parallm:train", "sorted set", "trainer", "30 d", "policies by their trainer's heartbeat")
# By it a run knows whether it has been trained here
ring_id = Key("parallm:train:ring", "string", "trainer", "730 d, refreshed", "a random name of this ring's data")
training = Key("parallm:train:{*}", "hash", "trainer", "30 d", "what the trainer says of itself; counts of alerts")
trainer_alive = Key("parallm:train:{*}:alive", "string", "trainer", "6 s", "the trainer that owns the policy")
training_steps = Key("parallm:train:{*}:steps", "stream", "trainer", "30 d, 4,096 entries", "train steps: the curves")
night_report = Key("parallm:train:{*}:night", "string", "trainer", "30 d", "what the last night learned, JSON")
training_alerts = Key("parallm:train:{*}:alerts", "stream", "trainer", "30 d, 256 entries", "alerts")
alert_channel = Name("parallm:alerts")
# Until a checkpoint of the trainer has learned from them
trajectories = Key("parallm:train:{*}:trajectories", "stream", "job runner", "7 d, bounded", "live trajectories, JSON")
trajectory_stats = Key(
    "parallm:train:{*}:trajectories:stats", "hash", "job runner", "7 d", "counts, and bytes that wait"
)
trajectories_seen = Key(
    "parallm:train:{*}:trajectories:seen", "sorted set", "job runner", "7 d", "ids, so that none comes twice"
)
training_orders = Key(
    "parallm:train:{*}:orders", "stream", "api", "1 d, 32 entries", "updates and checkpoints asked for"
)
# Fields: spec, epoch (of the service that has it), done (its last answered request), applied (the last one that its
# state holds), state, bytes (of its requests), trying and tries (a request that may end its service, and how often it
# was begun)
learner = Key("parallm:learner:{*}", "hash", "trainer", "7 d from the last request", "one learner: what, and how far")
# Until the learner's state holds them
learner_requests = Key(
    "parallm:learner:{*}:requests", "hash", "api", "7 d, refreshed", "its requests by number, msgpack"
)
learner_answer = Key("parallm:learner:{*}:answer:*", "string", "trainer", "1 h", "the answer to one request, msgpack")
learner_state = Key(
    "parallm:learner:{*}:state:*", "hash", "trainer", "7 d, refreshed; torn: 10 min", "weights and moments in chunks"
)
learner_saves = Key("parallm:learner:{*}:saves", "hash", "trainer", "30 d, refreshed", "saves by name, JSON")
learner_saved = Key(
    "parallm:learner:{*}:saved:*", "hash", "trainer", "the save's; torn: 10 min", "a saved state in chunks"
)
learner_service = Key(
    "parallm:{*}:learner-service", "string", "trainer", "10 s", "a service that trains learners, JSON"
)
# By the run whose train steps several processes share. Fields: epoch (of its leader), spec, ended
shared_run = Key("parallm:train-run:{*}", "hash", "trainer", "10 s, refreshed", "a run that others may join")
shared_members = Key("parallm:train-run:{*}:members", "sorted set", "trainer", "1 h, refreshed", "who computes with it")
shared_words = Key(
    "parallm:train-run:{*}:words", "stream", "trainer", "1 h, 256 entries", "what its leader says, msgpack"
)
shared_answers = Key(
    "parallm:train-run:{*}:answers", "stream", "trainer", "1 h, 256 entries", "what its members say, msgpack"
)
shared_bytes = Key(
    "parallm:train-run:{*}:bytes:*", "hash", "trainer", "10 min", "weights, parts of a step, gradients, in chunks"
)
# By the name of a federation. Fields: spec, round (the last one that is over), state, taken (whose weights it holds)
rounds = Key("parallm:train-rounds:{*}", "hash", "trainer", "7 d, refreshed", "runs that average their weights")
round_members = Key(
    "parallm:train-rounds:{*}:members", "sorted set", "trainer", "1 h, refreshed", "runs that live, by their heartbeat"
)
round_deltas = Key(
    "parallm:train-rounds:{*}:deltas:*", "hash", "trainer", "7 d", "of one round: each run's change, msgpack"
)
round_turn = Key("parallm:train-rounds:{*}:turn", "string", "trainer", "30 s", "who averages")
round_bytes = Key(
    "parallm:train-rounds:{*}:bytes:*",
    "hash",
    "trainer",
    "7 d; changes: the round's wait and 10 min",
    "weights and changes of weights, in chunks",
)
# By keeper. Things: session:ID, sampler:ID, sample:ID (a result, or who works on it)
tinker_thing = Key(
    "parallm:tinker:{*}:thing:*", "string", "api", "7 d, refreshed; a sample 1 h", "what a Tinker client has, msgpack"
)
# By the digest of an address that needs no key
tinker_download = Key("parallm:tinker-download:*", "string", "api", "15 min", "a checkpoint to be read, msgpack")
tinker_runs = Key("parallm:tinker:{*}:runs", "sorted set", "api", "7 d, refreshed", "learners by their creation")
score_orders = Key("parallm:score:orders", "stream", "api", "1 d, 256 entries", "texts to be scored at once")
answer = Key("parallm:answer:*", "string", "trainer, job runner or worker", "10 min", "the answer to an order, JSON")

# -- what sequences have written, by a digest of model, tenant and prompt: drafts for the next ones of the same prompt

_completions_ttl = "as the setting says; 1 d, from the last use"
completions = Key("parallm:{completions}:prompt:*", "list", "worker", _completions_ttl, "completions of one prompt")
completion_uses = Key(
    "parallm:{completions}:uses", "sorted set", "worker", "a day longer", "these prompts, by their last use"
)
completion_sizes = Key("parallm:{completions}:sizes", "hash", "worker", "a day longer", "bytes of each, and of `all`")

# -- figures of the ring

metric_totals = Key(
    "parallm:{metrics}:totals", "hash", "any process", "30 d, refreshed", "counts of all processes, summed"
)
process_metrics = Key(
    "parallm:{metrics}:process:*", "hash", "that process", "1 d, refreshed", "the counts that it has reported"
)
_rate_limits = Key(
    "parallm:limit:*", "string", "api", "twice its window", "requests of one API key, by name, in one window"
)
RATE_LIMITS = "parallm:limit"  # what the keys of the rate counters begin with; the rest is the library's
history = Key("parallm:{metrics}:history", "stream", "api", "1 d, 720 entries", "samples of the last hour: curves")
history_turn = Key("parallm:{metrics}:history-turn", "string", "api", "4.5 s", "which api process has sampled last")

# In a cluster all but arq:abort, which nobody uses, have the tag {parallm} (shared/redis/jobs/ticks.py)
_arq = Key("arq:*", "various", "job runner", "arq's own; 1 d at most", "arq's queue, jobs and results")

DOCUMENTED = tuple(_documented)
