"""How near two runs that average come to one that has all data: `python -m tests.bench.federation_steps`.

The tiny model learns right answers (cross-entropy) to additions of two families. The pooled run's batch is that of both
members together, so nothing but the averaging differs, and few steps tell what takes many in a noisy run
(tests/bench/federation.py): with p and f the movements of pooled and federated weights, `cosine` is that of f and p,
`along` f p / p p, the share of the pooled movement that the federated one makes. `product` is what averaging A and B
apart loses: |mean A mean B - mean A B| over how far mean A B has moved in a round, of all layers together.
"""

# ruff: noqa: E402
from mlx_model import fast_blas

fast_blas.install()

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from shared.text.codec import TextCodec
from tests.bench.federation import FAMILIES, family
from trainer.learn.adam import AdamSteps, StepSizes
from trainer.learn.options import AdapterShape
from trainer.learn.policy import Policy
from trainer.learners.federation import Average, RunChange, averaged
from trainer.state import Arrays, GradientMeans
from trainer.tiny.data import arithmetic_prompts

BETAS = (0.9, 0.99)
WARM_UP = 3
Example = tuple[list[int], list[int]]  # prompt, answer


def examples(loaded: LoadedModel, seed: int) -> dict[str, list[Example]]:
    """Additions of each family, with their right answers."""
    codec = TextCodec(loaded.tokenizer)
    found: dict[str, list[Example]] = {name: [] for name in FAMILIES}
    for task in arithmetic_prompts(3000, seed):
        prompt = codec.encode_chat([{"role": "user", "content": task.question}])
        answer = [*codec.encode(task.answer, add_special_tokens=False), loaded.card.eos_token_ids[0]]
        found[family(task.question)].append((list(prompt), answer))
    return found


def cross_entropy(model: nn.Module, tokens_BT: mx.array, mask_BT: mx.array) -> mx.array:
    """Mean over the answers' tokens; `mask_BT` is 1 where the next token is one of them."""
    loss_BT = nn.losses.cross_entropy(model(tokens_BT)[:, :-1], tokens_BT[:, 1:])
    return (loss_BT * mask_BT).sum() / mask_BT.sum()


class Run:
    """A LoRA that learns."""

    def __init__(self, loaded: LoadedModel, rate: float, seed: int) -> None:
        self.policy = Policy(loaded.model, AdapterShape(rank=64), seed=seed)
        self.adam = AdamSteps(self.policy.model)
        self._gradient = nn.value_and_grad(self.policy.model, cross_entropy)
        self._rate, self._steps = rate, 0

    def step(self, batch: Sequence[Example]) -> None:
        """One update."""
        self._steps += 1
        length = max(len(prompt) + len(answer) for prompt, answer in batch)
        tokens_BT, mask_BT = np.zeros((len(batch), length), np.int32), np.zeros((len(batch), length - 1), np.float32)
        for row, (prompt, answer) in enumerate(batch):
            end = len(prompt) + len(answer)
            tokens_BT[row, :end] = prompt + answer
            mask_BT[row, len(prompt) - 1 : end - 1] = 1
        _, gradient = self._gradient(self.policy.model, mx.array(tokens_BT), mx.array(mask_BT))
        rate = self._rate * min(1, self._steps / WARM_UP)
        self.adam.update(gradient, StepSizes(rate, BETAS, max_grad_norm=1.0))


def moved(after: Arrays, before: Arrays) -> npt.NDArray[np.float64]:
    """All parameters' changes in one row."""
    return np.concatenate([(after[name] - before[name]).ravel() for name in sorted(before)]).astype(np.float64)


def product_error(last: Arrays, members: Sequence[Arrays]) -> tuple[float, float]:
    """Squared norms, over all layers: of what averaging A and B apart loses, and of how far mean A B has moved."""
    lost = total = 0.0
    for name in (name.removesuffix("a") for name in last if name.endswith(".lora_a")):
        ab = [(each[f"{name}a"], each[f"{name}b"]) for each in members]
        product = np.mean([a @ b for a, b in ab], 0)
        lost += float(np.square(product - np.mean([a for a, _ in ab], 0) @ np.mean([b for _, b in ab], 0)).sum())
        total += float(np.square(product - last[f"{name}a"] @ last[f"{name}b"]).sum())
    return lost, total


@dataclass(frozen=True)
class Measure:
    """One start, and the samples of each step."""

    loaded: LoadedModel
    data: dict[str, list[Example]]
    options: argparse.Namespace
    seed: int

    def _run(self) -> Run:
        return Run(self.loaded, self.options.learning_rate, self.seed)

    def _drawn(self, step: int, name: str) -> list[Example]:
        """A member's samples of a step."""
        data = self.data[name]
        at = np.random.default_rng((self.seed, step, FAMILIES.index(name))).integers(0, len(data), self.options.batch)
        return [data[i] for i in at]

    def pooled(self) -> npt.NDArray[np.float64]:
        """How one run moves that has all samples."""
        run = self._run()
        start = run.policy.weights()
        for step in range(self.options.steps):
            run.step([example for name in FAMILIES for example in self._drawn(step, name)])
        return moved(run.policy.weights(), start)

    def federated(self, every: int, rate: float, average: bool) -> tuple[npt.NDArray[np.float64], float]:
        """How the average moves, and `product`; `average`: of moments, too."""
        runs = [self._run() for _ in FAMILIES]
        start = runs[0].policy.weights()
        last, lost, total = Average(start, {}), 0.0, 0.0
        for step in range(self.options.steps):
            for run, name in zip(runs, FAMILIES, strict=True):
                run.step(self._drawn(step, name))
            if (step + 1) % every:
                continue
            weights = [run.policy.weights() for run in runs]
            more = product_error(last.weights, weights)
            lost, total = lost + more[0], total + more[1]
            means = [run.adam.means(BETAS) if average else GradientMeans() for run in runs]
            changes = [{name: each[name] - last.weights[name] for name in each} for each in weights]
            last = averaged(last, [RunChange(d, 1, m) for d, m in zip(changes, means, strict=True)], rate, 0.0)
            for run in runs:
                run.policy.load(last.weights)
                if average:
                    run.adam.take_means(last.means, BETAS)
        return moved(last.weights, start), (lost / total) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="of each member; the pooled run's is that of both")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sync-every", type=int, nargs="+", default=[1, 2, 5], help="divisors of --steps")
    options = parser.parse_args()
    loaded = load_model(EngineConfig("models/tiny", dtype="float32"))
    for seed in options.seeds:
        measure = Measure(loaded, examples(loaded, seed), options, seed)
        whole = measure.pooled()
        for every in options.sync_every:
            for average, rate in ((False, 1.0), (False, 2**0.5), (True, 2**0.5)):
                part, lost = measure.federated(every, rate, average)
                cosine = part @ whole / (np.linalg.norm(part) * np.linalg.norm(whole))
                said = f"seed {seed}  rounds of {every}  moments {'average' if average else 'own':7}  rate {rate:.2f}"
                along = part @ whole / (whole @ whole)
                print(f"{said}  cosine {cosine:.3f}  along {along:.3f}  product {lost:.3f}", flush=True)


if __name__ == "__main__":
    main()
