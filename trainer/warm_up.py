"""Train steps on made-up samples before a hosted trainer's first ones, while no row is there that would wait for them.

On a GPU the first backward pass compiles its kernels: 15.7 s in which no row would get a token (Qwen3-0.6B's shape, one
NVIDIA H100). What is learned here is thrown away.
"""

import numpy as np

from trainer.learn.batches import Sample, SampleGroup
from trainer.learn.compute import Others, Work
from trainer.learners.loop_learner import build_learner
from trainer.parts import learner_options
from trainer.ranks.learner import LedLearner
from trainer.settings import TrainSettings
from worker.engine.model.loader import LoadedModel

GROUPS, SAMPLES = 8, 4
PROMPT, COMPLETION = 128, 256  # tokens, the second one at most
STEPS = 2  # the first one finds out how large a microbatch may be


def rehearse(loaded: LoadedModel, settings: TrainSettings, others: Others | None) -> Work[None]:
    """Train on made-up samples; runs in the engine's thread, with `others` on all ranks of a group."""
    options = learner_options(settings)
    if others is None:
        learner = build_learner(loaded.model, options)
    else:
        learner = LedLearner(others, loaded.model, options, loaded.whole)
    groups = _groups(loaded.card.vocab_size, min(COMPLETION, settings.max_tokens))
    for step in range(STEPS):
        yield from learner.train(groups, step, step, [groups[0].prompt_ids])


def _groups(vocab_size: int, completion: int) -> list[SampleGroup]:
    draw = np.random.default_rng(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(int(token) for token in draw.integers(0, vocab_size, count))

    def sample(at: int) -> Sample:
        logprobs = (-float(np.log(vocab_size)),) * completion
        return Sample(ids(completion), logprobs, (True,) * completion, (0,) * completion, 1.0 if at % 2 else -1.0)

    return [SampleGroup(str(at), ids(PROMPT), tuple(map(sample, range(SAMPLES)))) for at in range(GROUPS)]
