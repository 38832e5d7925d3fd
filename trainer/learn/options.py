"""The options of a train step: schedule, loss, optimizer, shape of the adapter. Plain data, without MLX.

A schedule is a pure function of the train step, so that a resumed run needs only its step number.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from shared.adapters import LoraKind, check_name
from shared.errors import InvalidRequestError, SetupError
from shared.heads import MAX_HIDDEN, REWARD, HeadSpec, check_heads
from shared.redis.connection.address import SCHEMES
from trainer.sharing import LearnerSettings

AdvantageScale = Literal["mean", "std", "leave_one_out", "maximum_likelihood"]
ImportanceLevel = Literal["token", "sequence"]
ScheduleName = Literal["constant", "linear", "cosine"]
TrainMode = Literal["rl", "reward", "sft", "dpo", "distill", "ppo"]
FEEDBACK = "feedback:"  # begins a data set that is no file
SESSIONS = "sessions:"  # likewise, of stored sessions


@dataclass(frozen=True)
class Schedule:
    """Warm-up from 0 to `peak`, then `name` down to `peak * final_fraction` at `total_steps`, and constant after."""

    name: ScheduleName = "constant"
    peak: float = 1e-5
    warmup_steps: int = 0
    total_steps: int = 0  # 0 with `constant` only
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        if self.name != "constant" and self.total_steps <= self.warmup_steps:
            steps = f"{self.total_steps} total, {self.warmup_steps} warm-up"
            raise ValueError(f"schedule {self.name!r} needs more total steps than warm-up steps: {steps}")

    def rate(self, step: int) -> float:
        """The learning rate of train step `step`, counted from 0; the first one already learns."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.name == "constant":
            return self.peak
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        remaining = 1 - progress if self.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * remaining)


LossName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo"]


@dataclass(frozen=True)
class LossOptions:
    """Name of the loss, and its constants."""

    name: LossName = "dapo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coefficient: float = 0.0  # beta; 0 skips the reference pass
    entropy_bonus: float = 0.0
    truncation: float = 2.0  # C of truncated importance sampling
    dual_clip: float = 3.0  # c: bound on the ratio where A < 0; 0: none
    level: ImportanceLevel = "token"  # of truncated importance sampling


CLIP_RANGES: Mapping[LossName, tuple[float, float]] = {"gspo": (3e-4, 4e-4), "ppo": (0.2, 0.2)}  # other than usual


@dataclass(frozen=True)
class ValueOptions:
    """Options of a value head that learns with the policy, and of the advantages from its values."""

    hidden: int = 0  # width of its hidden layer; 0: it is linear
    rate: float = 1.0  # its learning rate, in multiples of the adapter's
    coefficient: float = 0.5  # of its loss
    clip: float = 0.0  # how far a value learns in a train step; 0: no bound
    discount: float = 1.0
    decay: float = 0.95  # lambda of GAE
    scale: AdvantageScale = "mean"  # or "std"


@dataclass(frozen=True)
class AdapterShape:
    """Kind and rank of an adapter, and the linear layers that it is on."""

    kind: LoraKind = "lora"
    rank: int = 16
    scale: float = 2.0  # the factor on B A x: mlx-lm's `scale`, PEFT's alpha / r
    targets: tuple[str, ...] = ()  # ends of module paths such as "q_proj"; (): every linear inside a layer


MemoryKind = Literal["", "lstm", "gru"]
RatioBase = Literal["sampler", "trainer"]


@dataclass(frozen=True)
class TeachingOptions:
    """How much a teacher's verdict on each token weighs, and the advantages of rewards."""

    coefficient: float = 1.0
    rewards: float = 1.0


@dataclass(frozen=True)
class OptimizeOptions:
    """Constants of every train step."""

    loss: LossOptions = field(default_factory=LossOptions)
    value: ValueOptions | None = None  # with the loss "ppo"
    schedule: Schedule = field(default_factory=Schedule)
    ratio: RatioBase = "sampler"
    teaching: TeachingOptions = TeachingOptions()
    routing_replay: bool = False  # compute with the experts that the sampler chose
    minibatches: int = 1
    epochs: int = 1
    microbatch_tokens: int = 8192
    microbatch_s: float = 0.0  # bound on the time of one; 0: none
    microbatch_bytes: int = 0  # and then on the memory that it takes; 0: none
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.99)
    max_completion: int = 256  # L_max of Dr.GRPO
    distances_every: int = 10  # train steps between two measurements of mismatch and staleness; 0: never
    seed: int = 0


class HeadSettings(BaseModel):
    """Part of TrainSettings: what `--mode reward` and `--loss ppo` alone know."""

    head: str = Field(
        default="",
        description="mode reward: name of the head that learns; default: reward, or policy for one that acts",
    )
    head_hidden: int = Field(
        default=0,
        ge=0,
        le=MAX_HIDDEN,
        description="mode reward, loss ppo: width of the head's hidden layer; 0: a linear head",
    )
    head_only: bool = Field(default=False, description="mode reward, loss ppo: train the head alone, without a LoRA")
    head_learning_rate: float = Field(
        default=1e-3, gt=0, description="mode reward, loss ppo: learning rate of the head; learning_rate is the LoRA's"
    )


class PpoSettings(BaseModel):
    """Part of TrainSettings: what `--mode ppo`, and in part `--loss ppo`, alone know."""

    network: Path | None = Field(
        default=None, description="mode ppo: JSON file that describes the network; default: two layers of 64, tanh"
    )
    memory: MemoryKind = Field(
        default="", description="mode ppo, without network: make the first layer an lstm or a gru; default: tanh"
    )
    bptt_steps: int = Field(
        default=16,
        ge=1,
        description="mode ppo, networks with memory: steps through which gradients go back; a divisor of rollout_steps",
    )
    environment_copies: int = Field(
        default=256, ge=1, le=512, description="mode ppo: environments played at once, each a row of one request"
    )
    rollout_steps: int = Field(default=32, ge=1, description="mode ppo: steps of each environment in one train step")
    episode_steps: int = Field(
        default=500, ge=1, description="mode ppo: most steps of an episode, which is then cut off"
    )
    update_epochs: int | None = Field(
        default=None,
        ge=1,
        description="modes ppo, rl: times that each step or sample is used in training; default: 4, 1",
    )
    discount: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="mode ppo, loss ppo: discount of a reward per step; default: 0.99, per token 1",
    )
    gae_lambda: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="mode ppo, loss ppo: lambda of GAE: 0: advantages rely on the values, 1: on the rewards",
    )
    value_coefficient: float = Field(
        default=0.5, ge=0, description="mode ppo, loss ppo: factor on the loss of the values"
    )
    value_clip: float = Field(
        default=0.0,
        ge=0,
        description="mode ppo, loss ppo: largest change of a value in one train step; 0: no bound",
    )
    target_return: float = Field(
        default=0.0,
        ge=0,
        description="mode ppo: end the run when an evaluation reaches this return; 0: after its steps",
    )


class DataSettings(HeadSettings, PpoSettings, LearnerSettings):
    """Part of TrainSettings: the modes that learn from a data set, or an environment of ours, in place of rollouts of a
    language model, and what a run begins with."""

    mode: TrainMode = Field(
        default="rl",
        description="rl: from rewards; ppo: a network that acts in an environment; from a dataset: sft: answers; "
        "dpo: preferences; distill: a teacher's distribution; reward: a head that scores",
    )
    dpo_beta: float = Field(
        default=0.1,
        gt=0,
        description="mode dpo: how strongly the policy is held near the weights that the run began with",
    )
    feedback_max_age_days: float = Field(
        default=30.0,
        gt=0,
        description="mode dpo, dataset feedback:POLICY: preferences about older answers are left out",
    )
    teacher: str = Field(
        default="",
        description="mode distill: the teacher, a model or NAME@VERSION that the ring serves; mode rl: it scores the "
        "samples of each batch; or self: the policy, with each task's hint in its prompt",
    )
    teacher_coefficient: float = Field(
        default=1.0, gt=0, description="mode rl with a teacher: factor on log pi_teacher - log mu, a token's advantage"
    )
    reward_coefficient: float = Field(
        default=1.0,
        ge=0,
        description="mode rl with a teacher: factor on the advantages of rewards; 0: the teacher's verdict alone",
    )
    teacher_top_k: int = Field(
        default=20,
        ge=1,
        le=20,
        description="mode distill: most likely tokens of the teacher that are requested; all others count as one",
    )
    start_from: str = Field(
        default="",
        description="adapter to begin with: NAME@VERSION, or a folder (with a '/'); default: the base",
    )
    candidate: bool = Field(
        default=False,
        description="modes sft, dpo, distill: versions that pass the gate stay candidates; requests get one only once "
        "it is promoted, or by its number",
    )
    suite: Path | None = Field(
        default=None,
        description="mode distill: JSON lines of tasks of your own, scored by the reward; a version that earns less on "
        "them than what the run began with is rejected",
    )
    rehearsal: Path | None = Field(
        default=None,
        description="mode distill, dataset sessions:POLICY: JSON lines of prompts; the teacher's own replies to them "
        "are learned, too, so that they stay as they are",
    )
    min_lessons: int = Field(
        default=2, ge=2, description="mode distill, dataset sessions:POLICY: with fewer lessons the run does not begin"
    )
    drafts: int = Field(
        default=1,
        ge=1,
        le=64,
        description="mode distill, dataset sessions:POLICY: replies that the teacher writes to a corrected prompt; of "
        "several, the one that the correction makes likelier is learned as it stands",
    )
    lessons_since_ms: int = Field(
        default=0, ge=0, description="mode distill, dataset sessions:POLICY: leave out older turns; Unix milliseconds"
    )

    def value_options(self, loss: LossName, learning_rate: float, scale: AdvantageScale) -> ValueOptions | None:
        """Options of the value head that `--loss ppo` trains, None for other losses; `learning_rate` is the
        adapter's.
        """
        if loss != "ppo":
            return None
        return ValueOptions(
            self.head_hidden,
            self.head_learning_rate / learning_rate,
            self.value_coefficient,
            self.value_clip,
            1.0 if self.discount is None else self.discount,
            self.gae_lambda,
            scale,
        )

    def check_loss(self, loss: LossName, group_size: int, scale: AdvantageScale) -> None:
        """SetupError for settings that contradict how samples are compared."""
        if loss != "ppo":
            if group_size < 2:
                raise SetupError("--group-size 1 leaves a sample nothing to be compared with: use it with --loss ppo")
            return
        if scale in ("leave_one_out", "maximum_likelihood"):
            raise SetupError(
                f"--advantage-scale {scale} compares the samples of a group, which --loss ppo does not: it uses values"
            )

    def check_mode(self, shared: Iterable[str], dataset: Path | None, connect_to: str, loss: LossName) -> None:
        """SetupError for settings that the mode does not use, by name, and where there is nothing to learn from.

        `shared`: the settings of all processes.
        """
        own = {*_OF_MODES[self.mode], *(_OF_PPO_LOSS if self.mode == "rl" and loss == "ppo" else ())}
        own |= _OF_SUITE if self.mode == "distill" else set()
        for name in sorted(self._changed()):
            mode = next((mode for mode, names in _OF_MODES.items() if name in names), "")
            if mode and name not in own and self.mode == "rl":
                other = " or --loss ppo" if name in _OF_PPO_LOSS else ""
                raise SetupError(f"--{name.replace('_', '-')} goes with --mode {mode}{other}")
            if self.mode != "rl" and name not in {*own, *(_OF_PPO if self.mode == "ppo" else _OF_DATA), *shared}:
                raise SetupError(f"--{name.replace('_', '-')} has no use with --mode {self.mode}")
        if self.mode not in ("rl", "ppo") and dataset is None:
            what = {"reward": "pairs, scores, labels or actions", "dpo": "pairs"}.get(
                self.mode, "messages or completions"
            )
            raise SetupError(f"--mode {self.mode} needs a --dataset of {what}")
        if self.mode == "distill":
            self._check_teacher(connect_to)
        self._check_feedback(feedback_policy(dataset), connect_to)
        if (policy := sessions_policy(dataset)) is not None:
            self._check_asked(f"--dataset {SESSIONS}{policy}", policy, "distill", connect_to)
        elif asked := {"rehearsal", "min_lessons", "drafts", "lessons_since_ms"} & self._changed():
            raise SetupError(f"--{min(asked).replace('_', '-')} goes with --dataset {SESSIONS}POLICY")
        if self.suite is not None and "/" in self.start_from:
            raise SetupError("--suite compares versions that the ring serves: --start-from NAME@VERSION, not a folder")
        try:
            check_heads({self.head or REWARD: HeadSpec("scalar")})
        except ValueError as error:
            raise SetupError(f"--head: {error}") from error

    def _check_teacher(self, connect_to: str) -> None:
        if not self.teacher:
            raise SetupError("--mode distill needs a --teacher: a model or NAME@VERSION that the ring serves")
        if not _is_api(connect_to):
            raise SetupError(f"--teacher {self.teacher} is reached through an api: give --connect-to HOST:PORT")

    def _check_feedback(self, policy: str | None, connect_to: str) -> None:
        if policy is None:
            if "feedback_max_age_days" in self._changed():
                raise SetupError("--feedback-max-age-days goes with --dataset feedback:POLICY")
            return
        self._check_asked(f"--dataset {FEEDBACK}{policy}", policy, "dpo", connect_to)

    def _check_asked(self, asked: str, policy: str, mode: TrainMode, connect_to: str) -> None:
        """SetupError unless a data set that a ring's api has can be asked for."""
        if self.mode != mode:
            what = "preferences are" if mode == "dpo" else "what sessions teach is"
            raise SetupError(f"{asked}: {what} for --mode {mode}")
        if not _is_api(connect_to):
            raise SetupError(f"{asked} is read through an api: give --connect-to HOST:PORT")
        try:
            check_name(policy)
        except InvalidRequestError as error:
            raise SetupError(f"{asked}: {error}") from error

    def _changed(self) -> set[str]:
        """The settings that are not what they are by default."""
        fields = type(self).model_fields.items()
        return {name for name, field in fields if getattr(self, name) != field.get_default(call_default_factory=True)}


def _is_api(connect_to: str) -> bool:
    return bool(connect_to) and connect_to.partition("://")[0] not in SCHEMES


def feedback_policy(dataset: Path | None) -> str | None:
    """The policy whose users' preferences are the data set; None: it is a file."""
    given = str(dataset or "")
    return given.removeprefix(FEEDBACK) if given.startswith(FEEDBACK) else None


def sessions_policy(dataset: Path | None) -> str | None:
    """The policy whose stored sessions are the data set; None: it is a file."""
    given = str(dataset or "")
    return given.removeprefix(SESSIONS) if given.startswith(SESSIONS) else None


_TUNING = {"chat_template_kwargs", "start_from"}
_OF_MODES: Mapping[TrainMode, Collection[str]] = {  # what few modes have a use for
    "rl": _TUNING | {"update_epochs", "teacher", "teacher_coefficient", "reward_coefficient"},
    "reward": {*HeadSettings.model_fields, "start_from"},
    "dpo": _TUNING | {"dpo_beta", "feedback_max_age_days", "candidate"},
    "sft": _TUNING | {"candidate"},
    "distill": _TUNING
    | {"teacher", "teacher_top_k", "candidate", "suite", "rehearsal", "min_lessons", "drafts", "lessons_since_ms"},
    "ppo": PpoSettings.model_fields.keys(),
}
_OF_SUITE = {"reward", "reward_options", "max_tokens", "max_base_kl", "own_code_timeout_s", "own_code_processes"}
_OF_PPO_LOSS = {
    "head_hidden", "head_only", "head_learning_rate", "discount", "gae_lambda", "value_coefficient", "value_clip",
}  # fmt: skip
_OF_DATA = {  # settings of a trainer that all modes have a use for which learn from a data set
    "model", "dtype", "mode", "over_http", "connect_key", "adapter", "adapter_keep_n", "run", "run_dir", "learn_when",
    "seed", "dataset", "held_out_dataset", "steps", "prompts_per_step", "lora_kind", "lora_rank", "lora_scale",
    "lora_targets", "learning_rate", "schedule", "warmup_steps", "final_rate_fraction", "max_grad_norm", "weight_decay",
    "adam_beta1", "adam_beta2", "microbatch_tokens", "gradient_checkpointing", "max_parity", "reward_margin",
    "max_rejections", "evaluate_every", "checkpoint_every", "keep_checkpoints", "resume", "move_run", "replace_latest",
}  # fmt: skip
_OF_PPO = {  # settings of a trainer that `--mode ppo` has a use for, too
    "mode", "task", "task_options", "own_code_timeout_s", "connect_key", "adapter", "run", "run_dir", "seed", "steps",
    "clip_low", "clip_high", "entropy_bonus", "dual_clip", "learning_rate", "schedule", "warmup_steps",
    "final_rate_fraction", "max_grad_norm", "weight_decay", "adam_beta1", "adam_beta2", "minibatches", "max_probe_kl",
    "max_parity", "max_rejections", "evaluate_every", "evaluate_prompts", "checkpoint_every", "keep_checkpoints",
    "resume", "replace_latest",
}  # fmt: skip
