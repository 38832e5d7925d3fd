"""The codecs of a process: each is fetched and built once."""

import asyncio

import pytest

from shared.sequences import ModelCard
from shared.text.codec import CodecCache, TokenizerBundle

EMPTY = '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
CARD = ModelCard("m", 16, 1, (), "sha", "", kv_bytes_per_token=1, dtype="float32")


class Registry:
    """Counts fetches; the first `failures` of them fail."""

    def __init__(self, failures: int = 0) -> None:
        self.fetches, self._failures = 0, failures

    async def tokenizer(self, sha256: str) -> TokenizerBundle:
        self.fetches += 1
        await asyncio.sleep(0)
        if self.fetches <= self._failures:
            raise ConnectionError("away")
        return TokenizerBundle(tokenizer_json=EMPTY, chat_template="", eos_token_ids=(), special_tokens={})


async def test_many_who_wait_at_once_share_one_build() -> None:
    registry = Registry()
    cache = CodecCache(registry)  # type: ignore[arg-type]
    first, *others = await asyncio.gather(*(cache.codec(CARD) for _ in range(20)))
    assert registry.fetches == 1 and all(other is first for other in others)


async def test_a_waiter_that_goes_takes_nothing_from_the_others() -> None:
    cache = CodecCache(Registry())  # type: ignore[arg-type]
    goes = asyncio.create_task(cache.codec(CARD))
    stays = asyncio.create_task(cache.codec(CARD))
    await asyncio.sleep(0)
    goes.cancel()
    assert (await stays).vocab_size == 1


async def test_a_failed_fetch_is_tried_again_by_the_next() -> None:
    registry = Registry(failures=1)
    cache = CodecCache(registry)  # type: ignore[arg-type]
    with pytest.raises(ConnectionError):
        await cache.codec(CARD)
    assert (await cache.codec(CARD)).vocab_size == 1
