"""`mlx_parallm_train`: the settings of a run. Flags > environment (`PARALLM_*`) > YAML > defaults; unknown keys fail.

The defaults are for real models. `trainer/recipes/` holds settings for the tiny one, with what they reach.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, SecretStr, field_validator

from shared.adapters import LoraKind, check_name
from shared.errors import InvalidRequestError, SetupError
from shared.jobs import SamplingOverrides
from shared.process.group_settings import TrainerGroupSettings
from shared.process.machine_settings import MachineSettings
from shared.process.panels import TRAINER, Panels
from shared.process.process_settings import JoinSettings
from shared.rewards.model_kinds import OWN_VARIABLES
from shared.trajectories import drawing_of
from trainer.learn.gate import GateSettings
from trainer.learn.learn_when import FORMS, LearnWhen
from trainer.learn.options import (
    CLIP_RANGES,
    AdapterShape,
    AdvantageScale,
    DataSettings,
    ImportanceLevel,
    LossName,
    LossOptions,
    OptimizeOptions,
    RatioBase,
    Schedule,
    ScheduleName,
    TeachingOptions,
)
from trainer.loggers.choice import LoggerSettings
from trainer.rollouts.atropos import Registration
from trainer.rollouts.curriculum_settings import CurriculumSettings
from trainer.rollouts.held_out import HeldOutSettings

_OF_DATA_SETS = ("dataset", "held_out_dataset", "reward", "reward_options", "system_prompt")


def _no(value: Any) -> Any:
    return "no" if value is False else value  # YAML reads a bare `no` as false


class TrainSettings(
    HeldOutSettings,
    CurriculumSettings,
    LoggerSettings,
    GateSettings,
    JoinSettings,
    DataSettings,
    TrainerGroupSettings,
    MachineSettings,
):
    """Settings of `mlx_parallm_train`: one process per policy."""

    is_trainer: ClassVar[bool] = True
    panels: ClassVar[Panels] = TRAINER

    model: str = Field(
        default="models/tiny",
        validation_alias=AliasChoices("model", "model_path", "PARALLM_MODEL"),
        description="model folder, hub name or GGUF file; the same as the workers'",
    )
    dtype: Literal["", "float32", "float16", "bfloat16"] = Field(
        default="", description="data type of the base; default: the model's, float32 on a Linux CPU"
    )
    over_http: bool = Field(
        default=False,
        description="with --connect-to an api: use the api for everything, so that the ring's Redis is not needed",
    )
    connect_key: SecretStr = Field(
        default=SecretStr(""),
        validation_alias=AliasChoices("connect_key", "api_key", "PARALLM_CONNECT_KEY", "PARALLM_API_KEY"),
        description="API key for the api that --connect-to names",
    )
    adapter: str = Field(default="policy", description="name under which adapter versions are published")
    adapter_keep_n: int = Field(
        default=16,
        ge=0,
        description="versions that remain in the store after publishing over Redis, besides latest, best and "
        "those in use; 0: all",
    )
    run: str = Field(default="", description="name of the run; default: the adapter's")
    run_dir: Path = Field(
        default=Path(".parallm/train"), description="folder of checkpoints, metrics and rejected versions"
    )
    seed: int = Field(default=0, ge=0, description="seed of tasks, samples and the adapter's first weights")

    learn_when: str = Field(
        default="",
        description=f"conditions that all must hold, or training waits: {FORMS} (local time), separated by commas",
    )

    task: str = Field(
        default="arithmetic",
        description="arithmetic, jsonl, gsm8k; mode ppo: cart-pole, cart-pole-force, cart-pole-masked; or module:Class",
    )
    task_count: int = Field(
        default=0,
        ge=0,
        description="number of different tasks, which are repeated; 0: all, or 1024 where a curriculum needs a limit",
    )
    dataset: Path | None = Field(
        default=None,
        description="file of JSON lines, for the tasks jsonl and gsm8k and the modes sft, dpo, reward, distill; "
        "dpo: feedback:POLICY, too",
    )
    reward: str = Field(
        default="",
        description="reward of a data set: a name, or package.module:function; default: gsm8k for that task, else"
        " exact",
    )
    reward_options: dict[str, Any] = Field(default_factory=dict, description="options of the reward")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description='variables of the chat template, such as {"enable_thinking": false}'
    )
    system_prompt: str = Field(default="", description="put before every chat of a data set")
    task_options: dict[str, Any] = Field(default_factory=dict, description="options of the environment's class")
    own_code_timeout_s: float = Field(
        default=60.0, gt=0, description="time limit of one call of your own reward or environment"
    )
    own_code_processes: int = Field(
        default=4,
        ge=1,
        le=64,
        description="processes of your own reward or environment, started once a call has blocked the first one",
    )
    max_turns: int = Field(default=1, ge=1, description="most replies in one sample, with tool results in between")

    steps: int = Field(default=100, ge=1, description="train steps")
    prompts_per_step: int = Field(
        default=32,
        ge=1,
        validation_alias=AliasChoices("prompts_per_step", "train_batch_size", "PARALLM_PROMPTS_PER_STEP"),
        description="groups in one train step; each has group_size samples",
    )
    source: Literal["prompts", "live", "both", "posted"] = Field(
        default="prompts",
        description="what to learn from: own prompts, live traffic, both, or only trajectories that users post",
    )
    atropos_url: str = Field(default="", description="URL of Atropos' run-api, whose environments to learn from")
    atropos_max_token_len: int = Field(
        default=2048, ge=1, description="longest sequence that Atropos' environments may send"
    )
    live_trajectories: int = Field(
        default=64,
        ge=2,
        validation_alias=AliasChoices("live_trajectories", "update_frequency", "PARALLM_LIVE_TRAJECTORIES"),
        description="trajectories of live traffic in one train step",
    )
    group_size: int = Field(
        default=8,
        ge=1,
        validation_alias=AliasChoices("group_size", "num_generations", "PARALLM_GROUP_SIZE"),
        description="samples of each prompt",
    )
    max_tokens: int = Field(
        default=256,
        ge=1,
        validation_alias=AliasChoices(
            "max_tokens", "max_completion_length", "max_response_length", "PARALLM_MAX_TOKENS"
        ),
        description="longest reply; longer ones are cut off (mask_overlong decides whether they count)",
    )
    temperature: float = Field(default=1.0, gt=0, description="sampling temperature of rollouts")
    top_p: float = Field(default=1.0, gt=0, le=1, description="top-p of rollouts")
    top_k: int = Field(default=0, ge=0, description="top-k of rollouts; 0: off")
    min_p: float = Field(default=0.0, ge=0, le=1, description="min-p of rollouts; 0: off")
    stop: tuple[str, ...] = Field(default=(), description="texts that end a reply")

    loss: LossName = Field(default="dapo", description="the objective; trainer/learn/losses.py defines each")
    advantage_scale: AdvantageScale = Field(
        default="mean",
        description="how rewards of a group become advantages: mean (Dr.GRPO), std (GRPO), leave_one_out (RLOO), "
        "maximum_likelihood (MaxRL)",
    )
    clip_low: float | None = Field(
        default=None, gt=0, description="how far below 1 the ratio is clipped; default: 0.2, for gspo 0.0003"
    )
    clip_high: float | None = Field(
        default=None, gt=0, description="how far above 1 the ratio is clipped; default: 0.28, for ppo 0.2, gspo 0.0004"
    )
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        validation_alias=AliasChoices("kl_coefficient", "beta", "kl_loss_coef", "PARALLM_KL_COEFFICIENT"),
        description="factor on the KL divergence (k3) from the weights that the run began with; 0 skips that pass",
    )
    entropy_bonus: float = Field(
        default=0.0, ge=0, description="factor on the mean entropy, which is added to the objective"
    )
    importance_truncation: float = Field(
        default=2.0, ge=1, description="largest importance weight that corrects for an older or different sampler"
    )
    importance_level: ImportanceLevel = Field(
        default="token", description="what has its own weight in that correction: each token, or the whole sample"
    )
    dual_clip: float = Field(
        default=3.0, ge=0, description="largest ratio where the advantage is negative; 0: no bound"
    )
    ratio: RatioBase = Field(
        default="sampler",
        description="log-probabilities in the ratio's denominator: the sampler's or the trainer's; trainer with "
        "max_lag 0: runs repeat byte for byte",
    )
    routing_replay: bool = Field(
        default=False,
        description="mixtures of experts: samples come with the experts that their tokens were computed with, and train"
        " steps compute with the same ones",
    )
    mask_overlong: bool = Field(default=True, description="leave samples that reach max_tokens out of the loss")

    lora_kind: LoraKind = Field(default="lora", description="kind of the adapter")
    lora_rank: int = Field(default=16, ge=1, le=1024, description="rank of the adapter: rows of A, columns of B")
    lora_scale: float = Field(default=2.0, gt=0, description="factor on B A x; alpha = scale * rank")
    lora_targets: tuple[str, ...] = Field(
        default=(),
        validation_alias=AliasChoices("lora_targets", "lora_target_modules", "PARALLM_LORA_TARGETS"),
        description="ends of the module paths to adapt; default: every linear inside a layer",
    )

    learning_rate: float = Field(default=1e-5, gt=0, description="learning rate of AdamW after the warm-up")
    schedule: ScheduleName = Field(default="constant", description="schedule of the learning rate")
    warmup_steps: int = Field(default=0, ge=0, description="train steps over which the learning rate grows from 0")
    final_rate_fraction: float = Field(
        default=0.1, ge=0, le=1, description="share of the learning rate at which linear and cosine schedules end"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradients are clipped to this norm")
    weight_decay: float = Field(default=0.0, ge=0, description="weight decay of AdamW")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the first moment")
    adam_beta2: float = Field(default=0.99, ge=0, lt=1, description="AdamW's decay of the second moment")
    minibatches: int = Field(default=1, ge=1, description="updates per epoch in one train step")
    microbatch_tokens: int = Field(default=8192, ge=1, description="positions in one backward pass")
    microbatch_s: float = Field(
        default=0.0,
        ge=0,
        description="longest time of one backward pass in seconds; 0: only microbatch_tokens bounds it",
    )
    microbatch_gb: float = Field(
        default=0.0,
        ge=0,
        description="most memory of one backward pass, with microbatch_s; 0: hosted, a sixteenth of what is free;"
        " else no bound",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="compute layers again in the backward pass, which is slower and takes less memory"
    )

    max_lag: int = Field(default=1, ge=0, description="largest age of a token, in policy steps; 0: on-policy")
    live_max_lag: int = Field(default=8, ge=0, description="the same bound for live traffic")
    group_deadline_s: float = Field(
        default=600.0, gt=0, description="a group whose samples are not complete after this time is given up"
    )
    distances_every: int = Field(
        default=10, ge=0, description="train steps between measurements of the mismatch between sampler and trainer"
    )

    on_foreign_version: Literal["adopt", "pause", "override"] = Field(
        default="pause",
        description="when another client moves the policy's latest version: train on from it (adopt), wait for an"
        " operator (pause), or serve the run's own version again (override)",
    )
    no_signal_after: int = Field(
        default=5, ge=1, description="train steps in a row with nothing to learn from before an alert"
    )
    probe_prompts: int = Field(default=8, ge=1, description="fixed prompts on which the gate compares versions")
    parity_every: int = Field(
        default=10, ge=0, description="train steps between comparisons of log-probabilities with a worker; 0: none"
    )

    checkpoint_every: int = Field(default=20, ge=0, description="train steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = Field(
        default=3,
        ge=1,
        validation_alias=AliasChoices("keep_checkpoints", "keep_n_checkpoints", "PARALLM_KEEP_CHECKPOINTS"),
        description="newest checkpoints that remain, besides the best",
    )
    resume: Annotated[str, BeforeValidator(_no)] = Field(
        default="latest", description="checkpoint to continue from: latest, best, its name, or no"
    )
    replace_latest: bool = Field(
        default=False, description="begin although the adapter's latest version comes from another run, and replace it"
    )
    move_run: bool = Field(default=False, description="continue here a run that was trained on another ring")

    @property
    def run_name(self) -> str:
        """First part of every id."""
        return self.run or self.adapter

    @property
    def source_shown(self) -> str:
        """Where trajectories come from, for people."""
        own = "atropos" if self.atropos_url else self.source
        return "atropos and live" if own == "atropos" and self.source == "both" else own

    @property
    def reward_name(self) -> str:
        """The reward of a data set."""
        return self.reward or ("gsm8k" if self.task == "gsm8k" else "exact")

    @property
    def folder(self) -> Path:
        """Where the run's files are."""
        return self.run_dir / self.run_name

    @property
    def versions_kept(self) -> int:
        """Number of versions that stay in the store: at least the ones that pending samples may be pinned to."""
        return max(self.adapter_keep_n, self.max_lag + 3) if self.adapter_keep_n else 0

    def adapter_shape(self) -> AdapterShape:
        """Kind, rank and place of the adapter."""
        return AdapterShape(self.lora_kind, self.lora_rank, self.lora_scale, self.lora_targets)

    def sampling(self) -> SamplingOverrides:
        """How rollouts are drawn, and which log-probabilities the loss needs: those of what was drawn from."""
        routed = self.routing_replay
        plain = SamplingOverrides(max_tokens=self.max_tokens, stop=self.stop, return_routed_experts=routed)
        drawn = SamplingOverrides(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
            logprobs_mode="processed_logprobs",
            return_routed_experts=routed,
        )
        return plain if drawing_of(drawn) is None else drawn

    @field_validator("learn_when")
    @classmethod
    def _known_conditions(cls, text: str) -> str:
        LearnWhen.parse(text)
        return text

    @property
    def conditions(self) -> LearnWhen:
        return LearnWhen.parse(self.learn_when)

    def check(self) -> None:
        """SetupError when settings contradict each other: before a model is loaded, not after."""
        if self.atropos_url and self.source in ("live", "posted"):
            raise SetupError(
                f"--atropos-url with --source {self.source}: give --source both to learn from live traffic, too"
            )
        if self.over_http and (self.redis or not self.connect_to):
            raise SetupError("--over-http goes with --connect-to HOST:PORT of an api, and without --redis")
        if self.over_http and self.source in ("live", "both"):
            raise SetupError(f"--source {self.source} reads live traffic from Redis: leave out --over-http")
        for flag, name in (("--adapter", self.adapter), ("--run", self.run_name)):
            try:
                check_name(name)
            except InvalidRequestError as error:
                raise SetupError(f"{flag}: {error}") from error
        if wrong := sorted(self.chat_template_kwargs.keys() & OWN_VARIABLES):
            raise SetupError(f"--chat-template-kwargs: {wrong[0]!r} is not a template variable of its own")
        self._check_learn_when()
        self.check_learner(self.over_http)
        shared = {*JoinSettings.model_fields, *TrainerGroupSettings.model_fields}
        self.check_mode(shared, self.dataset, self.connect_to, self.loss)
        if self.mode == "rl":
            self.check_loss(self.loss, self.group_size, self.advantage_scale)
            self._check_tasks()
            self._check_teaching()
            self.check_held_out()
            self.check_curriculum(self.task, self.source, self.atropos_url)
        self.check_loggers()
        try:
            self.optimize_options()
        except ValueError as error:
            raise SetupError(f"bad settings: {error}") from error

    def _check_learn_when(self) -> None:
        elsewhere = {
            "--learner": self.learner != "own",
            "--join-run": bool(self.join_run),
            "--agents": self.agents is not None,
            "--num-local-ranks": self.num_local_ranks > 1,
            "--distributed-hostfile": bool(self.distributed_hostfile),
            "--mode ppo": self.mode == "ppo",
        }
        for flag in (flag for flag, given in elsewhere.items() if given and self.conditions):
            raise SetupError(f"--learn-when holds the work of one process that trains by itself: leave out {flag}")

    def _check_tasks(self) -> None:
        """Nothing that is given for one kind of task is left out in silence because the run has another kind."""
        data_set, arithmetic = self.task in ("jsonl", "gsm8k"), self.task == "arithmetic"
        scored = data_set or self.held_out_dataset is not None
        unused = {
            "dataset": not data_set,
            "held_out_dataset": arithmetic,
            "reward": not scored,
            "reward_options": not scored,
            "system_prompt": not scored,
            "task_options": data_set or arithmetic,
            "held_out_options": data_set or arithmetic or self.held_out_dataset is not None,
            "task_count": not data_set and not arithmetic and self.curriculum == "uniform",
        }
        for name in (name for name, useless in unused.items() if useless and getattr(self, name)):
            need = "--task jsonl or gsm8k" if name in _OF_DATA_SETS else "an environment: --task package.module:Class"
            if name == "task_count":
                need = "--task arithmetic, jsonl or gsm8k, or a --curriculum"
            raise SetupError(f"--{name.replace('_', '-')} has no use with --task {self.task}: it goes with {need}")

    def _check_teaching(self) -> None:
        if not self.teacher:
            for name in ("teacher_coefficient", "reward_coefficient"):
                if getattr(self, name) != 1:
                    raise SetupError(f"--{name.replace('_', '-')} goes with a --teacher")
            return
        if self.loss in ("ppo", "gspo"):
            raise SetupError(f"--teacher gives each token an advantage, which --loss {self.loss} has no use for")
        if self.over_http or self.atropos_url or self.source != "prompts":
            raise SetupError("--teacher scores samples of the run's own prompts, over the ring's Redis")
        if drawing_of(self.sampling()) is not None:
            raise SetupError("--teacher compares the models' own probabilities: leave temperature 1, without filters")

    def cautions(self) -> list[str]:
        """Warnings of settings that are allowed and seldom meant, for the log."""
        said = []
        if self.atropos_url:
            said.append(
                "atropos_url: its environments say nothing of temperature and filters, so samples are taken for those "
                "of temperature 1, unfiltered"
            )
        if self.top_p < 1 or self.top_k or self.min_p:
            said.append(
                "top_p, top_k or min_p: the ratio is taken between filtered distributions, and what the filters leave "
                "out is never learned from"
            )
        said += self.curriculum_cautions(evaluates=bool(self.evaluate_every))
        held_out = self.held_out_dataset or self.held_out_options or self.task == "arithmetic"
        if self.evaluate_every and not held_out:
            said.append("evaluate_every without held_out_dataset or held_out_options: evaluated on the training tasks")
        return said

    def registration(self, train_step: int) -> Registration:
        """Registration of this run at Atropos' run-api."""
        return Registration(
            wandb_group=self.run_name,
            wandb_project=self.logger_project,
            batch_size=self.prompts_per_step * self.group_size,
            max_token_len=self.atropos_max_token_len,
            checkpoint_dir=str(self.folder / "checkpoints"),
            save_checkpoint_interval=self.checkpoint_every,
            starting_step=train_step,
            num_steps=self.steps,
        )

    def optimize_options(self) -> OptimizeOptions:
        """The constants of a train step; ValueError when they contradict each other."""
        clip_low, clip_high = CLIP_RANGES.get(self.loss, (LossOptions.clip_low, LossOptions.clip_high))
        loss = LossOptions(
            self.loss,
            clip_low if self.clip_low is None else self.clip_low,
            clip_high if self.clip_high is None else self.clip_high,
            self.kl_coefficient,
            self.entropy_bonus,
            self.importance_truncation,
            self.dual_clip,
            self.importance_level,
        )
        schedule = Schedule(self.schedule, self.learning_rate, self.warmup_steps, self.steps, self.final_rate_fraction)
        return OptimizeOptions(
            loss=loss,
            value=self.value_options(self.loss, self.learning_rate, self.advantage_scale),
            schedule=schedule,
            ratio=self.ratio,
            teaching=TeachingOptions(self.teacher_coefficient, self.reward_coefficient),
            routing_replay=self.routing_replay,
            minibatches=self.minibatches,
            epochs=self.update_epochs or 1,
            microbatch_tokens=self.microbatch_tokens,
            microbatch_s=self.microbatch_s,
            microbatch_bytes=int(self.microbatch_gb * 1e9),
            max_grad_norm=self.max_grad_norm,
            weight_decay=self.weight_decay,
            adam_betas=(self.adam_beta1, self.adam_beta2),
            max_completion=self.max_tokens * self.max_turns,
            distances_every=self.distances_every,
            seed=self.seed,
        )
