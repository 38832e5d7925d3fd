"""Routing replay on a small mixture of experts: `python -m tests.bench.routing [--prompts 6] [--samples 4]`.

A Qwen3-MoE of random weights in 4 bits is served in bf16 and trained in fp32, so sampler and trainer have the same
weights and compute otherwise. Printed is how far the trainer's log-probabilities of samples are from the sampler's,
without routing replay and with it: mean and largest difference, k3 estimate of the KL, and the share of experts that
the trainer's routers choose otherwise. Experts' outputs are scaled up, for those of random weights hardly matter.
The exit code is 1 where replay does not lower the mean.
"""

# ruff: noqa: E402  (the faster BLAS has to be in place before mlx is imported)
from mlx_model import fast_blas

fast_blas.install()

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

from mlx_model.config import EngineConfig
from mlx_model.loader import LoadedModel, load_model
from mlx_model.routing import NotedRoutes
from shared.sequences import SamplingParams, SequenceSpec, Timings
from shared.trajectories import Reward, Trajectory, result_of, trajectory_of
from tests.engine.conftest import Bench
from tests.engine.small_models import QWEN3, write_tokenizer
from trainer.learn.batches import pad, sample_groups
from trainer.learn.logprobs import shared_scores, to_arrays
from trainer.learn.options import AdapterShape
from trainer.learn.policy import Policy
from trainer.rollouts.groups import RolloutGroup

EXPERTS, CHOSEN, LAYERS, PROMPT, LENGTH = 32, 4, 6, 24, 48
CONFIG: dict[str, Any] = QWEN3 | {
    "model_type": "qwen3_moe", "num_hidden_layers": LAYERS, "hidden_size": 128, "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "vocab_size": 1024, "tie_word_embeddings": False,
}  # fmt: skip


def write(folder: Path) -> Path:
    """A model of 4 bits whose experts matter."""
    module = importlib.import_module("mlx_lm.models.qwen3_moe")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(CONFIG))
    model.lm_head.weight = model.lm_head.weight * 4
    for layer in model.layers:
        layer.mlp.switch_mlp.down_proj.weight = layer.mlp.switch_mlp.down_proj.weight * 8
        layer.self_attn.o_proj.weight = layer.self_attn.o_proj.weight * 3
    model, config = quantize_model(model, dict(CONFIG), group_size=32, bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def sampled(served: LoadedModel, prompts: int, samples: int) -> list[RolloutGroup]:
    """Groups that an engine has sampled, with their experts."""
    bench, draw = Bench(served), np.random.default_rng(0)
    specs = [
        [
            SequenceSpec(
                id=f"{at}-{s}", model="m", prompt_ids=ids, group=str(at),
                sampling=SamplingParams(LENGTH, seed=100 * at + s, ignore_eos=True, return_routed_experts=True),
            )
            for s in range(samples)
        ]
        for at, ids in enumerate(tuple(draw.integers(0, 1000, PROMPT).tolist()) for _ in range(prompts))
    ]  # fmt: skip
    bench.submit(*(spec for group in specs for spec in group))
    bench.run()

    def of(spec: SequenceSpec, sample: int) -> Trajectory:
        result = result_of(spec, 1, "w", bench.events[spec.id], Timings())
        return trajectory_of(spec, result, "", sample, {}, Reward("r", float(sample)))

    each = [tuple(of(spec, s) for s, spec in enumerate(group)) for group in specs]
    return [RolloutGroup(str(at), at, trajectories) for at, trajectories in enumerate(each)]


def otherwise(trained: LoadedModel, trajectory: Trajectory) -> float:
    """Share of the sampler's experts that the trainer's routers do not choose."""
    ids = [*trajectory.prompt_ids, *trajectory.completion_ids]
    noted = NotedRoutes(trained.model)
    trained.model(mx.array([ids]))
    own = np.array(noted.take(1, len(ids)))[0, PROMPT - 1 : -1].reshape(LENGTH, LAYERS, CHOSEN)
    theirs = np.frombuffer(trajectory.routes, np.uint8).reshape(LENGTH, LAYERS, CHOSEN)
    return float(1 - (theirs[..., None] == own[..., None, :]).any(axis=-1).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--samples", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(write(Path(folder)))
        served, trained = (load_model(EngineConfig(path, dtype=dtype)) for dtype in ("bfloat16", "float32"))
        groups = sampled(served, options.prompts, options.samples)
        batch = pad(sample_groups(groups, {}, mask_overlong=False)[0])
        arrays, means = to_arrays(batch), []
        for replays in (False, True):
            policy = Policy(trained.model, AdapterShape(rank=4))
            if replays:
                policy.replay_routes()
            off = (np.array(shared_scores(policy.model, arrays).logp_BT) - batch.sampler_BT)[batch.mask_BT]
            means.append(float(np.abs(off).mean()))
            kl = float((np.exp(off) - off - 1).mean())
            print(f"replay {replays!s:5}  mean {means[-1]:.4f}  largest {np.abs(off).max():.3f}  kl {kl:.4f}")
        shares = [otherwise(trained, t) for group in groups for t in group.trajectories]
    print(f"experts chosen otherwise: {np.mean(shares):.3f}; mean without over with replay: {means[0] / means[1]:.2f}")
    return int(means[1] >= means[0])


if __name__ == "__main__":
    sys.exit(main())
