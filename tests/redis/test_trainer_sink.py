"""The trainer's seams to its ring: whose version is the latest, the weights that others put there, whose samples."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis
from safetensors.numpy import load_file

from shared.adapter_files.config import read_config
from shared.errors import ConflictError, UnknownAdapterError
from shared.jobs import SamplingOverrides
from shared.redis.adapters.store import AdapterStore
from shared.redis.processes.worker_registry import WorkerRegistry
from tests.redis.adapter_versions import publish
from tests.redis.scripted_worker import CARD, MODEL, Answer, working
from tests.unit.adapter_files import RANK, lora, mlx_config, write
from tests.unit.api_texts import bundle, codec
from trainer.ring.join import way_to_ring
from trainer.ring.over_redis import StoreSink
from trainer.ring.ring import Candidate
from trainer.rollouts.groups import RolloutRequest
from trainer.settings import TrainSettings


async def test_a_trainer_sees_who_has_moved_the_latest_and_reads_what_others_put_there(
    redis: Redis, tmp_path: Path
) -> None:
    sink = StoreSink(redis, "policy", CARD)
    assert (await sink.latest_version(), await sink.served_base()) == (0, "")
    await WorkerRegistry(redis).register_model(CARD, bundle())
    assert await sink.served_base() == CARD.base_sha256
    await publish(AdapterStore(redis))
    folder = write(tmp_path / "adapter", mlx_config(), lora(seed=5))
    version = await sink.stage(Candidate(folder, 1, 1, CARD.base_sha256))
    with pytest.raises(ConflictError, match="the latest version of 'policy' is 1, not 7"):
        await sink.promote(version, (), if_latest=7)
    await sink.promote(version, (), if_latest=1)
    assert await sink.latest_version() == version
    stored = await sink.fetch(version)
    assert {name: value.tolist() for name, value in stored.weights.items()} == {
        name: value.tolist() for name, value in load_file(folder / "adapters.safetensors").items()
    }
    config = read_config(stored.config)
    assert (config.rank, config.scale, config.targets) == (RANK, 20.0, ("self_attn.q_proj", "self_attn.v_proj"))
    of_another = await StoreSink(redis, "another", CARD).fetch(version, "policy")
    assert of_another.config == stored.config and of_another.weights.keys() == stored.weights.keys()
    with pytest.raises(UnknownAdapterError):
        await sink.fetch(99)


async def test_two_policies_whose_runs_have_one_name_get_their_own_samples(redis_url: str) -> None:
    """Both ask at once under the same request id; what answers one of them has to reach that one."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(working(redis_url, lambda spec: Answer(codec().decode(spec.prompt_ids))))
        rings = []
        for policy in ("mine", "theirs"):
            settings = TrainSettings(redis=redis_url, model=MODEL, adapter=policy, run="night", learner="service")
            way = await stack.enter_async_context(way_to_ring(settings))
            rings.append((policy, await stack.enter_async_context(way.join(None))))
        asked = (
            ring.source.generate(
                RolloutRequest(
                    f"r{at}", tuple(codec().encode(f"{policy} {at}")), 2, SamplingOverrides(max_tokens=16), policy
                )
            )
            for at in range(8)
            for policy, ring in rings
        )
        answered = await asyncio.gather(*asked)
    said = [[sample.text for sample in samples] for samples in answered]
    assert said == [[f"{policy} {at}"] * 2 for at in range(8) for policy in ("mine", "theirs")]
