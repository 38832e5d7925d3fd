"""What a process that joins a run must have in common with it, by its settings."""

from dataclasses import replace

import msgspec

from shared.errors import SetupError
from shared.process.settings import version
from trainer.learners.kinds import PolicyOptions
from trainer.settings import TrainSettings
from trainer.shares.messages import RunSpec

SAME = (
    "lora_kind", "lora_rank", "lora_scale", "lora_targets", "seed", "loss", "clip_low", "clip_high", "kl_coefficient",
    "entropy_bonus", "importance_truncation", "dual_clip", "ratio", "minibatches", "update_epochs", "head_hidden",
    "head_only", "head_learning_rate", "discount", "gae_lambda", "value_coefficient", "value_clip", "advantage_scale",
)  # fmt: skip
_OWN = ("microbatch_tokens", "microbatch_s", "microbatch_gb", "gradient_checkpointing")  # as this machine can


def run_spec(settings: TrainSettings, options: PolicyOptions, model: str, base_sha256: str) -> RunSpec:
    """What others are told of a run."""
    return RunSpec(
        model=model,
        base_sha256=base_sha256,
        options=msgspec.msgpack.encode(options),
        settings=settings.model_dump(mode="json", include=set(SAME)),
        exchange=settings.exchange,
        version=version(),
    )


def options_of(spec: RunSpec, mine: TrainSettings, base_sha256: str) -> PolicyOptions:
    """What a member's learner is made with; SetupError when its base, or a setting that it was given, is another."""
    if spec.version != version():
        raise SetupError(f"the run {mine.join_run!r} is one of version {spec.version}, this is {version()}")
    if base_sha256 != spec.base_sha256:
        raise SetupError(
            f"the run {mine.join_run!r} trains another base than {mine.model}: it is {spec.model} "
            f"({spec.base_sha256[:12]}), this one {base_sha256[:12]}; weights and dtype must be the same"
        )
    given = mine.model_dump(mode="json", include=set(SAME) & mine.model_fields_set)
    for name, value in given.items():
        if value != spec.settings.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise SetupError(f"{flag} {value}, but the run {mine.join_run!r} has {spec.settings.get(name)}")
    options = msgspec.msgpack.decode(spec.options, type=PolicyOptions)
    sizes = {name for name in _OWN if name in mine.model_fields_set}
    optimize = options.optimize
    if "microbatch_tokens" in sizes:
        optimize = replace(optimize, microbatch_tokens=mine.microbatch_tokens)
    if "microbatch_s" in sizes:
        optimize = replace(optimize, microbatch_s=mine.microbatch_s)
    if "microbatch_gb" in sizes:
        optimize = replace(optimize, microbatch_bytes=int(mine.microbatch_gb * 1e9))
    layers = mine.gradient_checkpointing if "gradient_checkpointing" in sizes else options.checkpoint_layers
    return replace(options, optimize=optimize, checkpoint_layers=layers)
