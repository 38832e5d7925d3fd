"""`--learner shared` and `--join-run`: real processes share train steps; leader and a member are killed (kill -9)."""

import signal
import threading
from pathlib import Path

from tests.e2e.rings import MODEL, Process, Ring
from tests.training.kills import check, train
from trainer.learners.shared_exchange import LOOK_S
from trainer.runs.metrics import read

STEPS, FROZEN_S = 6, 6 + 2 * LOOK_S  # longer than a member may be silent


def joined(served: Ring) -> Process:
    arguments = ("--redis", served.redis_url, "--model", f"models/{MODEL}", "--log-json", "true")
    return Process.start("trainer", *arguments, "--join-run", "shared")


def test_a_shared_run_outlives_its_leader_and_members_that_die_or_freeze(served: Ring, tmp_path: Path) -> None:
    killed, frozen, *late = joined(served), joined(served)
    over = threading.Event()

    def disturb() -> None:
        while not over.wait(0.02):
            if read(tmp_path / "shared" / "metrics.jsonl"):
                killed.stop(signal.SIGKILL)
                frozen.popen.send_signal(signal.SIGSTOP)
                over.wait(FROZEN_S)
                frozen.popen.send_signal(signal.SIGCONT)
                return

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        outcome = train(served, tmp_path, "shared", steps=STEPS, max_lag=0, kills=1, learner="shared", trainers=2)
        check(outcome, STEPS, on_policy=True)
        over.set()
        thread.join()
        assert frozen.wait() == 0, frozen.output
        assert frozen.printed('"member.ready"') and frozen.printed('"member.ended"')
        late.append(joined(served))
        assert late[0].wait() == 0, f"the run is over, which it was told:\n{late[0].output}"
    finally:
        over.set()
        thread.join()
        for process in (killed, frozen, *late):
            process.stop(signal.SIGKILL)
