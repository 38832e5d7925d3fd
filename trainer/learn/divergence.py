"""Distance of a student from a teacher of whom only the likeliest tokens are known.

Soft targets (Hinton, Vinyals, Dean: arXiv 1503.02531, section 2, at temperature 1): the cross entropy of the student's
distribution q under the teacher's p. Of p the k likeliest tokens K are known; all others count as one token, the rest,
so that a student cannot please by giving everything to K, as it could if K were made a distribution of its own:

    L = sum over i in K of p_i (log p_i - log q_i)  +  p_R (log p_R - log q_R),
    p_R = 1 - sum of p_i,  q_R = 1 - sum of q_i  (i in K)

This is KL(p || q) of both, looked at through K and the rest: 0 where they agree, and never above the KL of the whole
vocabulary. The terms of p alone do not depend on q, so its gradient is that of the cross entropy.

Shape suffixes: N positions, H hidden, K the teacher's tokens.
"""

import math
from collections.abc import Callable

import mlx.core as mx

UNKNOWN = -1e9  # log-probability of what fills a row of fewer tokens than K
REST = 1e-7  # no rest is smaller: fp32 knows 1 - sum no better


def divergence(logits_NV: mx.array, ids_NK: mx.array, teacher_NK: mx.array) -> mx.array:
    """L [N] for the student's logits and the teacher's log-probabilities."""
    logits_NV = logits_NV.astype(mx.float32)
    total_N1 = mx.logsumexp(logits_NV, axis=-1, keepdims=True)
    student_NK = mx.take_along_axis(logits_NV, ids_NK, axis=-1) - total_N1
    p_NK = mx.exp(teacher_NK)
    known_N = (p_NK * (teacher_NK - student_NK)).sum(axis=-1)
    p_rest_N, q_rest_N = _rest(p_NK), _rest(mx.where(teacher_NK > UNKNOWN, mx.exp(student_NK), 0.0))
    return known_N + p_rest_N * (mx.log(p_rest_N) - mx.log(q_rest_N))


def divergences(
    head: Callable[[mx.array], mx.array], hidden_NH: mx.array, ids_NK: mx.array, teacher_NK: mx.array, chunk: int
) -> mx.array:
    """The same from hidden states; the head takes `chunk` positions at a time and runs again for gradients, 0: all."""
    count = len(hidden_NH)
    if not chunk or count <= chunk:
        return divergence(head(hidden_NH[None])[0], ids_NK, teacher_NK)
    step = math.ceil(count / math.ceil(count / chunk))

    def part_from(at: int) -> mx.array:
        # Targets come by the closure: a checkpoint differentiates all of its inputs.
        def part(part_NH: mx.array) -> mx.array:
            return divergence(head(part_NH[None])[0], ids_NK[at : at + step], teacher_NK[at : at + step])

        again: Callable[[mx.array], mx.array] = mx.checkpoint(part)
        return again(hidden_NH[at : at + step])

    return mx.concatenate([part_from(at) for at in range(0, count, step)])


def _rest(p_NK: mx.array) -> mx.array:
    return mx.maximum(1 - p_NK.sum(axis=-1), REST)
