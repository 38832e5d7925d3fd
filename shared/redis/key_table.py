"""What every key in Redis is: its type, its owner, its time to live, its meaning.

A key's owner is the only role that creates and deletes it. The tests of leaked keys, docs/redis.md and
docs/reference.md follow this table; keys.py makes the names.
"""

from typing import NamedTuple


class KeyKind(NamedTuple):
    """One documented family of keys; `pattern` is a redis-cli glob."""

    pattern: str
    type: str
    owner: str
    ttl: str
    meaning: str


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
    KeyKind("parallm:children", "hash", "serve", "30 s, refreshed", "child processes that end again and again, JSON"),
    KeyKind("parallm:models", "sorted set", "worker", "7 d", "model names by heartbeat"),
    KeyKind("parallm:{*}:model", "string", "worker", "7 d", "model card, JSON"),
    KeyKind("parallm:tokenizer:*", "string", "worker", "7 d", "tokenizer bundle, JSON, by sha256"),
    KeyKind("parallm:api:{*}", "hash", "api", "60 s", "heartbeat"),
    KeyKind("parallm:api:{*}:frames", "stream", "worker", "60 s, bounded", "token frames of one api process"),
    KeyKind("parallm:request:*", "hash", "api", "1 h", "how to resume a streamed request"),
    KeyKind("parallm:named:*", "set", "api", "1 h, refreshed", "requests by the name that their client gave them"),
    KeyKind("parallm:job:{*}", "hash", "api", "7 d", "one job's spec, state, counts"),
    KeyKind("parallm:job:{*}:inputs", "list", "api", "7 d", "input lines, JSON"),
    KeyKind("parallm:job:{*}:results:*", "hash", "job runner", "7 d", "trajectories, JSON, by ordinal"),
    KeyKind("parallm:job:{*}:lease", "string", "job runner", "10 s", "which runner advances the job"),
    KeyKind("parallm:jobs", "sorted set", "api", "7 d", "job ids by creation"),
    KeyKind("parallm:jobs:of:*", "sorted set", "api", "7 d", "job ids of one tenant by creation"),
    KeyKind("parallm:jobs:active", "sorted set", "api", "7 d", "ids of jobs not yet terminal"),
    KeyKind("parallm:idem:job:*", "string", "api", "1 d", "idempotency key -> job id"),
    KeyKind("parallm:file:{*}", "string", "api", "the file's; 7 d unless asked", "one file's description, JSON"),
    KeyKind("parallm:file:{*}:bytes", "hash", "api", "the file's; 1 h while it is written", "its bytes in chunks"),
    KeyKind("parallm:files", "sorted set", "api", "30 d, refreshed", "file ids by creation"),
    KeyKind("parallm:files:of:*", "sorted set", "api", "30 d, refreshed", "file ids of one tenant by creation"),
    KeyKind("parallm:batch:{*}", "hash", "api", "8 d, refreshed", "one batch's spec, state, errors, times"),
    KeyKind("parallm:batch:{*}:lease", "string", "api", "4 s", "which api process checks lines or writes files"),
    KeyKind("parallm:batches", "sorted set", "api", "8 d, refreshed", "batch ids by creation"),
    KeyKind("parallm:batches:of:*", "sorted set", "api", "8 d, refreshed", "batch ids of one tenant by creation"),
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
    KeyKind("parallm:train:ring", "string", "trainer", "730 d, refreshed", "a random name of this ring's data"),
    KeyKind("parallm:train:{*}", "hash", "trainer", "30 d", "what the trainer says of itself; counts of alerts"),
    KeyKind("parallm:train:{*}:alive", "string", "trainer", "6 s", "the trainer that owns the policy"),
    KeyKind("parallm:train:{*}:steps", "stream", "trainer", "30 d, 4,096 entries", "train steps: the curves"),
    KeyKind("parallm:train:{*}:alerts", "stream", "trainer", "30 d, 256 entries", "alerts"),
    KeyKind("parallm:train:{*}:trajectories", "stream", "job runner", "7 d, bounded", "live trajectories, JSON"),
    KeyKind("parallm:train:{*}:trajectories:stats", "hash", "job runner", "7 d", "counts, and bytes that wait"),
    KeyKind("parallm:train:{*}:trajectories:seen", "sorted set", "job runner", "7 d", "ids, so that none comes twice"),
    KeyKind("parallm:train:{*}:orders", "stream", "api", "1 d, 32 entries", "updates and checkpoints asked for"),
    KeyKind("parallm:score:orders", "stream", "api", "1 d, 256 entries", "texts to be scored at once"),
    KeyKind("parallm:answer:*", "string", "trainer, job runner or worker", "10 min", "the answer to an order, JSON"),
    KeyKind("parallm:{metrics}:totals", "hash", "any process", "30 d, refreshed", "counts of all processes, summed"),
    KeyKind("parallm:{metrics}:process:*", "hash", "that process", "1 d, refreshed", "what it has told of its counts"),
    KeyKind("parallm:limit:*", "string", "api", "twice its window", "requests of one API key, by name, in one window"),
    KeyKind("parallm:{metrics}:history", "stream", "api", "1 d, 720 entries", "samples of the last hour: curves"),
    KeyKind("parallm:{metrics}:history-turn", "string", "api", "4.5 s", "which api process has sampled last"),
    KeyKind("arq:*", "various", "job runner", "arq's own; 1 d at most", "arq's queue, jobs and results"),
)
