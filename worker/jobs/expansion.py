"""From a job and its prompts to sequences: pure arithmetic, the same whoever computes it.

A sequence's id and seed follow from the job, the prompt and the sample, so expanding a prompt again after a crash
yields the same sequences, which the queue already knows.
"""

import hashlib

from shared.jobs import JobSpec
from shared.sequences import SamplingParams, SequenceKind, SequenceSpec
from worker.jobs.prompts import PreparedPrompt

SEED_BITS = 53  # exact in JSON everywhere


def derive_seed(job_seed: int, prompt_index: int, sample_index: int) -> int:
    """Seed of one sample: the first 53 bits of BLAKE2b-64 of "<job seed>:<prompt>:<sample>" (big endian)."""
    name = f"{job_seed}:{prompt_index}:{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> (64 - SEED_BITS)


def sequence_id(job_id: str, ordinal: int) -> str:
    """Id of the sequence of one sample."""
    return f"{job_id}-{ordinal}"


def ordinal_of(sequence: str) -> int:
    """The sample that a sequence's id names."""
    return int(sequence.rpartition("-")[2])


def sequences(spec: JobSpec, prompt: PreparedPrompt, now_ms: int, trace: str = "") -> list[SequenceSpec]:
    """The group of one prompt; `trace`: a traceparent."""
    first = prompt.index * spec.n
    own = prompt.source.request  # a batch's line
    return [
        SequenceSpec(
            id=sequence_id(spec.id, first + sample),
            model=spec.model,
            prompt_ids=prompt.prompt_ids,
            sampling=sampling(spec, prompt.index, sample) if own is None else own.sampling,
            sequence_class="batch",
            kind=_kind(spec) if own is None else own.kind,
            pooling="mean" if own is None else own.pooling,
            group=f"{spec.id}-p{prompt.index}" if spec.n > 1 else "",
            score_ids=prompt.score_ids,
            job=spec.id,
            adapter=spec.adapter,
            adapter_policy=spec.adapter_policy,
            deadline_ms=spec.deadline_ms,
            enqueued_ms=now_ms,
            trace=trace,
            tenant=spec.tenant,
        )
        for sample in range(spec.n)
    ]


def _kind(spec: JobSpec) -> SequenceKind:
    return "score" if spec.kind == "score" else "generate"


def is_sample(spec: JobSpec, seq: str) -> bool:
    """Whether a sequence's id is that of a sample of this job."""
    job, dash, ordinal = seq.rpartition("-")
    known = bool(dash) and job == spec.id and ordinal.isascii() and ordinal.isdigit() and len(ordinal) < 16
    return known and int(ordinal) < spec.total_prompts * spec.n and sequence_id(spec.id, int(ordinal)) == seq


def sampling(spec: JobSpec, prompt_index: int, sample_index: int) -> SamplingParams:
    """The job's sampling with this sample's own seed."""
    fields = {name: getattr(spec.sampling, name) for name in spec.sampling.__struct_fields__}
    fields["seed"] = derive_seed(spec.sampling.seed or 0, prompt_index, sample_index)
    return SamplingParams(**fields)


def prompts_to_expand(spec: JobSpec, window: int, expanded: int, recorded: int, most: int) -> int:
    """How many more prompts to enqueue now: whole groups within the window, at least one when nothing is in flight.

    `most` bounds the sequences of one call, except that a group is never cut.
    """
    in_flight = expanded * spec.n - recorded
    room = min((window - in_flight) // spec.n, max(1, most // spec.n))
    if in_flight <= 0:
        room = max(room, 1)
    return max(0, min(room, spec.total_prompts - expanded))
