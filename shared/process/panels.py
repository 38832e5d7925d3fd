"""The `--help` of a process with many settings: in panels, the common ones first, and a usage of one line.

A test holds that each setting of the process stands in one panel.
"""

from collections.abc import Collection, Mapping
from typing import Any

Panels = Mapping[str, Collection[str]]  # title -> settings


def in_panels(panels: Panels) -> dict[str, Any]:
    """Arguments for pydantic-settings' command line that put each flag into its panel; {} without panels."""
    if not panels:
        return {}
    title_of = {name: title for title, names in panels.items() for name in names}
    groups: dict[str, Any] = {}

    def add(parser: Any, *flags: str, **given: Any) -> Any:
        if not groups:
            parser.usage = "%(prog)s [--config FILE] [--FLAG VALUE ...]; --help lists the flags"
            groups.update({title: parser.add_argument_group(title) for title in panels})
        flags = tuple(flag for flag in flags if flag.islower())  # names of variables are no flags for people
        where = groups.get(title_of.get(given.get("dest", ""), ""), parser)  # the parser itself has -h
        return where.add_argument(*flags, **given)

    return {"add_argument_method": add}


# Of `mlx_parallm_train`
TRAINER: Panels = {
    "common": (
        "config", "connect_to", "redis", "model", "adapter", "mode", "task", "dataset", "reward", "reward_options",
        "system_prompt", "steps", "prompts_per_step", "group_size", "max_tokens", "learning_rate", "kl_coefficient",
        "lora_rank", "held_out_dataset", "evaluate_every", "resume",
    ),
    "the run": (
        "run", "run_dir", "learn_when", "seed", "start_from", "replace_latest", "move_run", "checkpoint_every",
        "keep_checkpoints", "dry_run",
    ),
    "tasks and rewards": (
        "task_count", "task_options", "chat_template_kwargs", "own_code_timeout_s", "own_code_processes", "max_turns",
        "source", "live_trajectories", "live_max_lag", "atropos_url", "atropos_max_token_len",
    ),
    "rollouts": ("temperature", "top_p", "top_k", "min_p", "stop", "max_lag", "group_deadline_s"),
    "loss": (
        "loss", "advantage_scale", "mask_overlong", "clip_low", "clip_high", "dual_clip", "entropy_bonus", "ratio",
        "importance_truncation", "importance_level", "teacher_coefficient", "reward_coefficient",
        "routing_replay",
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
    "the machine": ("memory_limit", "wired_limit", "on_battery", "keep_awake"),
    "the ring": ("connect_key", "redis_password", "over_http", "adapter_keep_n"),
    "modes dpo and distill": (
        "dpo_beta", "feedback_max_age_days", "teacher", "teacher_top_k", "candidate", "suite", "rehearsal",
        "min_lessons", "drafts", "lessons_since_ms",
    ),
    "heads: mode reward, loss ppo": (
        "head", "head_hidden", "head_only", "head_learning_rate",
    ),
    "networks: mode ppo, and in part loss ppo": (
        "network", "memory", "bptt_steps", "environment_copies", "rollout_steps", "episode_steps", "discount",
        "gae_lambda", "value_coefficient", "value_clip", "target_return",
    ),
    "curricula": (
        "curriculum", "curriculum_floor", "curriculum_target", "curriculum_hopeless", "curriculum_solved",
        "curriculum_pace", "curriculum_field", "curriculum_levels",
    ),
    "several policies, processes and machines": (
        "num_local_ranks", "distributed_mode", "distributed_sharding", "distributed_strict", "distributed_hostfile",
        "distributed_rank", "distributed_ibv_devices", "distributed_jaccl_coordinator", "distributed_group",
        "distributed_silence_s", "distributed_turn_s", "agents", "learner", "learner_wait_s", "join_run", "trainers",
        "federation", "sync_every", "sync_redis", "sync_wait_s", "sync_moments", "outer_rate", "outer_momentum",
        "exchange",
    ),
}  # fmt: skip
