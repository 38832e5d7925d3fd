"""Slower time for simulated workers and apis, so that few cores can simulate a thousand of them.

Every period, patience and time to live that decides how often Redis is asked grows by one factor, decode steps too.
Then Redis gets the same commands in the same proportions, only more slowly: what it spends in a second, times the
factor, is what it would spend at full pace. Its own clock (`serverCron`) is slowed as far as it goes (servers.py).
"""

import api.batches.work
import api.load
import api.openai.responses.background
import api.ops.history_sampler
import api.ops.ring_history
import api.ring.ring
import api.webhooks.work
import shared.redis.adapters.watch
import shared.redis.connection.client
import shared.redis.processes.metric_store
import shared.redis.processes.shared_look
import shared.redis.queue.affinity
import shared.redis.queue.sequence_queue
import shared.redis.tokens.feed
import shared.redis.tokens.reader
import shared.redis.tokens.writer
import worker.engine_watch
import worker.pause
import worker.process
from shared.redis import keys

LEASE_MS = 3000
HEALTH_CHECK_S = 15

PERIODS = {
    worker.process: ("HEARTBEAT_S", "WAIT_S"),
    worker.pause: ("LOOK_S",),
    worker.engine_watch: ("LOOK_S",),
    keys: ("WORKER_TTL_S", "API_TTL_S"),
    shared.redis.connection.client: ("ANSWER_S", "ANSWER_OF_PRIMARY_S"),  # longer than an idle worker blocks
    shared.redis.processes.shared_look: ("FRESH_MS", "TURN_MS"),
    shared.redis.processes.metric_store: ("WRITE_EVERY_S",),
    shared.redis.queue.sequence_queue: ("STEAL_AFTER_MS", "STAGGER_S", "TURN_MS"),
    shared.redis.queue.affinity: ("LOOK_AGAIN_S",),
    shared.redis.tokens.writer: ("EXPIRE_EVERY_S",),
    shared.redis.tokens.reader: ("LOOK_EVERY_S", "HEARTBEAT_S", "PROBE_S", "PING_EVERY_S"),
    shared.redis.tokens.feed: ("SILENCE_S", "PATIENCE_S", "GAP_S"),
    api.ring.ring: ("LOOK_AGAIN_S", "WATCH_S", "ANSWER_S", "GIVEN_UP_S"),
    api.batches.work: ("LOOK_S",),
    api.openai.responses.background: ("LOOK_S",),
    api.webhooks.work: ("LOOK_S",),
    api.ops.history_sampler: ("SAMPLE_EVERY_S",),
    api.ops.ring_history: ("SAMPLE_EVERY_S",),
    api.load: ("LAG_LOOK_S",),
}


def slow_down(factor: int) -> None:
    """Once in a process, before workers or apis are made there."""
    for module, names in PERIODS.items():
        for name in names:
            setattr(module, name, getattr(module, name) * factor)
    watch = shared.redis.adapters.watch.watch
    watch.__kwdefaults__["reread_s"] *= factor


def slow_url(url: str, factor: int) -> str:
    """Of Redis, for clients that send their PINGs as seldom as all else."""
    return f"{url}?health_check_interval={HEALTH_CHECK_S * factor}"
