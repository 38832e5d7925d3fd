"""What the worker's settings mean for the engine."""

from shared.settings import WorkerSettings
from worker.engine.messages import EngineConfig


def engine_config(s: WorkerSettings) -> EngineConfig:
    """The engine's configuration."""
    return EngineConfig(
        model=s.model,
        served_name=s.served_model_name or s.model.rstrip("/").rsplit("/", 1)[-1],
        max_rows=s.max_batch_size,
        prefill_rows=s.prefill_batch_size,
        prefill_chunk=s.prefill_chunk,
        warm_up=s.warm_up,
        kv_limit_bytes=int(s.kv_memory_gb * 1e9) or None,
        dtype=s.dtype or None,
        max_context=s.max_context or None,
        trust_remote_code=s.trust_remote_code,
        prefix_cache_bytes=int(s.prefix_cache_gb * 1e9),
        block_size=s.block_size,
        guest_share=s.training_share,
    )
