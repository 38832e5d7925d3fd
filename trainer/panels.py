"""`mlx_parallm_train --help`: which setting stands in which panel. A test holds that each stands in one."""

from shared.process.options.group import TrainerGroupSettings
from shared.process.panels import Panels
from trainer.curricula.settings import CurriculumSettings
from trainer.learn.options import HeadSettings, PpoSettings
from trainer.sharing import LearnerSettings

PANELS: Panels = {
    "common": (
        "config", "connect_to", "redis", "model", "adapter", "mode", "task", "dataset", "reward", "reward_options",
        "system_prompt", "steps", "prompts_per_step", "group_size", "max_tokens", "learning_rate", "kl_coefficient",
        "lora_rank", "held_out_dataset", "evaluate_every", "resume",
    ),
    "the run": (
        "run", "run_dir", "seed", "start_from", "replace_latest", "move_run", "checkpoint_every", "keep_checkpoints",
        "dry_run",
    ),
    "tasks and rewards": (
        "task_count", "task_options", "chat_template_kwargs", "own_code_timeout_s", "own_code_processes", "max_turns",
        "source", "live_trajectories", "live_max_lag", "atropos_url", "atropos_max_token_len",
    ),
    "rollouts": ("temperature", "top_p", "top_k", "min_p", "stop", "max_lag", "group_deadline_s"),
    "loss": (
        "loss", "advantage_scale", "mask_overlong", "clip_low", "clip_high", "dual_clip", "entropy_bonus", "ratio",
        "importance_truncation",
    ),
    "adapter and optimizer": (
        "lora_kind", "lora_scale", "lora_targets", "schedule", "warmup_steps", "final_rate_fraction", "max_grad_norm",
        "weight_decay", "adam_beta1", "adam_beta2", "minibatches", "update_epochs", "microbatch_tokens", "microbatch_s",
        "microbatch_gb", "gradient_checkpointing", "dtype",
    ),
    "evaluation": (
        "evaluate_prompts", "held_out_options", "held_out_reward", "held_out_reward_options", "reward_margin",
        "min_groups",
    ),
    "gate and alerts": (
        "max_update_rms", "max_probe_kl", "max_base_kl", "max_best_kl", "max_logprob_gap", "max_parity",
        "max_rejections", "max_rollbacks", "on_foreign_version", "no_signal_after", "probe_prompts", "parity_every",
        "distances_every",
    ),
    "logs and loggers": (
        "show_samples", "logger", "logger_project", "logger_samples", "tensorboard", "log_level", "log_json",
        "otlp_endpoint",
    ),
    "the ring": ("connect_key", "redis_password", "over_http", "adapter_keep_n"),
    "modes dpo and distill": ("dpo_beta", "feedback_max_age_days", "teacher", "teacher_top_k"),
    "heads: mode reward, loss ppo": tuple(HeadSettings.model_fields),
    "networks: mode ppo, and in part loss ppo": tuple(PpoSettings.model_fields.keys() - {"update_epochs"}),
    "curricula": tuple(CurriculumSettings.model_fields),
    "several policies, processes and machines": (*LearnerSettings.model_fields, *TrainerGroupSettings.model_fields),
}  # fmt: skip
