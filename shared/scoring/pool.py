"""Rewards computed in processes of their own, so that no completion can stall or crash the caller.

A sample whose reward raises or takes longer than `timeout_s` gets a `Reward` with `error`; its job goes on unharmed.
A process is handed a slice of samples at a time, which is short, and slices take turns by key and job
(shared/turns.py), so that nobody's rewards wait for more than a slice of somebody else's. A process that
neither answers nor obeys its timer is killed, and so is one whose caller has left.
"""

import asyncio
import hashlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from shared.errors import InvalidRequestError, ServiceUnavailableError
from shared.jobs import Prompt, RewardSpec
from shared.process.call_process import CallProcess, LostProcessError
from shared.rewards.kinds import CheckedReward
from shared.scoring.process import LATE, Slice, Trial
from shared.scoring.shares import Lateness, Share
from shared.trajectories import Reward
from shared.turns import FairTurns

CHUNK = 16  # samples a slice, at most
SLICE_S = 0.5  # after which a slice begins no other sample
GRACE_S = 15.0  # beyond the samples' own time: starting a process and importing math-verify
ANSWER_S = 1.0  # that a process may be late with an answer
COMPILE_S = 2.0  # for a reward's patterns
TRIAL_S = 15.0  # that a trial of patterns may wait for its turn
REMEMBERED = 1024  # patterns that have passed
_reward = msgspec.json.Decoder(Reward)


class RewardSample(NamedTuple):
    """Inputs of a reward for one completion."""

    completion: str
    reference: Any
    prompt: Prompt | None = None  # where a served model is asked
    model: str = ""  # whose token ids a prompt of ids has


class RewardPool:
    """A few processes that compute rewards; they start when first needed."""

    def __init__(self, processes: int = 0, timeout_s: float = 5.0, *, grace_s: float = GRACE_S) -> None:
        self.timeout_s = timeout_s
        self._grace_s = grace_s
        self._turns = FairTurns(processes or min(4, os.cpu_count() or 1))
        self._rested: list[_Process] = []
        self.processes: set[_Process] = set()
        self._lateness: WeakValueDictionary[tuple[str, bytes], Lateness] = WeakValueDictionary()
        self._passed: dict[bytes, None] = {}

    async def score(
        self, spec: RewardSpec, samples: Sequence[RewardSample], share: Share | None = None
    ) -> list[Reward]:
        """One reward per sample, in order; once the share has given up, the rest is not computed."""
        share = share or Share()
        reward = (share.key, _digest(spec))
        share.of_all = self._lateness.setdefault(reward, share.of_all)
        chunks = [samples[at : at + CHUNK] for at in range(0, len(samples), CHUNK)]
        tasks = [asyncio.create_task(self._chunk(spec, chunk, share)) for chunk in chunks]
        try:
            scored = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [reward for chunk in scored for reward in chunk]

    async def check(self, reward: CheckedReward, key: str = "") -> None:
        """InvalidRequestError when a pattern of the reward cannot be compiled, or not within its time."""
        if not reward.has_patterns or (digest := _digest(reward.spec)) in self._passed:
            return
        try:
            async with asyncio.timeout(TRIAL_S), self._turns.turn(key):
                wrong = await self._tried(reward.spec)
        except TimeoutError:
            raise ServiceUnavailableError("too many patterns wait to be checked; try again shortly") from None
        if wrong:
            raise InvalidRequestError(wrong, param="reward.options")
        self._passed[digest] = None
        if len(self._passed) > REMEMBERED:
            del self._passed[next(iter(self._passed))]

    def close(self) -> None:
        """Kill the processes that compute rewards."""
        for process in list(self.processes):
            self._end(process)

    async def _chunk(self, spec: RewardSpec, samples: Sequence[RewardSample], share: Share) -> list[Reward]:
        done: list[Reward] = []
        lost = 0  # processes, in a row, at the sample that is next
        while len(done) < len(samples):
            async with self._turns.turn(share.key, share.job):
                if share.given_up:
                    left_out = f"not computed: {share.late} samples in a row had timed out"
                    return [*done, *[_failed(spec, left_out)] * (len(samples) - len(done))]
                more, problem = await self._slice(spec, samples[len(done) :])
            lost = 0 if problem is None else (0 if more else lost) + 1
            if problem is not None and (lost == 2 or problem.startswith(LATE)):
                more, lost = [*more, _failed(spec, problem)], 0
            for reward in more:
                share.saw(is_late(reward))
            done += more
        return done

    async def _slice(self, spec: RewardSpec, samples: Sequence[RewardSample]) -> tuple[list[Reward], str | None]:
        """Rewards of the first samples, and what was wrong with the process at the one that follows them."""
        first, sent = self._sent(spec, samples)
        if not sent:
            return first, None
        process = await self._process()
        rewards: list[Reward] = []
        try:
            ready_s = 0.0 if spec.name in process.loaded else self._grace_s
            limit_s = SLICE_S + self.timeout_s + ready_s + 2 * ANSWER_S
            await process.call.send(msgspec.json.encode(Slice(spec, sent, self.timeout_s, SLICE_S, limit_s)))
            async with asyncio.timeout(limit_s) as limit:
                while answer := await process.call.receive():
                    rewards.append(_reward.decode(answer))
                    process.loaded.add(spec.name)
                    limit.reschedule(asyncio.get_running_loop().time() + self.timeout_s + ANSWER_S)
        except TimeoutError:
            self._end(process)
            return rewards, f"{LATE} {self.timeout_s:g} s, deaf to its timer"
        except LostProcessError:
            self._end(process)
            return rewards, "the reward ended its process"
        except BaseException:
            self._end(process)
            raise
        self._rested.append(process)
        return rewards, None

    def _sent(self, spec: RewardSpec, samples: Sequence[RewardSample]) -> tuple[list[Reward], list[tuple[str, bytes]]]:
        """The first samples as they travel; or the error of the first one, when it cannot."""
        sent: list[tuple[str, bytes]] = []
        for sample in samples:
            try:
                sent.append((sample.completion.encode().decode(), msgspec.json.encode(sample.reference)))
            except (RecursionError, ValueError, TypeError, OverflowError) as error:
                if not sent:
                    return [_failed(spec, f"text or reference cannot be scored: {error}"[:500])], []
                break
        return [], sent

    async def _tried(self, spec: RewardSpec) -> str:
        process = await self._process()
        try:
            async with asyncio.timeout(COMPILE_S + self._grace_s):
                await process.call.send(msgspec.json.encode(Trial(spec, COMPILE_S)))
                wrong = (await process.call.receive()).decode()
        except (TimeoutError, LostProcessError):
            self._end(process)
            return f"options of reward {spec.name!r}: the pattern could not be compiled in its time"
        except BaseException:
            self._end(process)
            raise
        self._rested.append(process)
        return wrong

    async def _process(self) -> "_Process":
        """An idle process, a new one if there is none."""
        while self._rested:
            process = self._rested.pop()
            if process.call.alive:
                return process
            self._end(process)
        process = _Process(await CallProcess.start("shared.scoring.process"))
        self.processes.add(process)
        return process

    def _end(self, process: "_Process") -> None:
        process.call.kill()
        self.processes.discard(process)
        if process in self._rested:
            self._rested.remove(process)


class _Process:
    """A process, and the rewards that it has loaded."""

    def __init__(self, call: CallProcess) -> None:
        self.call = call
        self.loaded: set[str] = set()


def is_late(reward: Reward) -> bool:
    """True if the sample's reward ran out of time."""
    return reward.error.startswith(LATE)


def _digest(spec: RewardSpec) -> bytes:
    """A short key for a reward and its options, which may be long."""
    return hashlib.sha256(msgspec.json.encode([spec.name, spec.options])).digest()


def _failed(spec: RewardSpec, error: str) -> Reward:
    return Reward(spec.name, None, error=error)
