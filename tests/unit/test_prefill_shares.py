"""How many prompts the batch feeds in one turn: pure."""

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.scheduler import SMALLEST_CHUNK, feed_together


def test_as_many_prompts_as_the_budget_feeds_to_their_end() -> None:
    assert feed_together([127] * 200, 4096, 64).prompts == 4096 // 127
    assert feed_together([127] * 200, 4096, 8).prompts == 8


def test_a_short_prompt_is_fed_beside_long_ones() -> None:
    together = feed_together([9000, 9000, 20, 9000, 9000], 4 * SMALLEST_CHUNK, 32)
    assert (together.prompts, together.chunk) == (4, SMALLEST_CHUNK)


def test_one_prompt_gets_the_whole_budget() -> None:
    assert feed_together([9000], 512, 32).chunk == 512


def test_forks_begin_to_decode_together_and_cost_nothing() -> None:
    together = feed_together([1] * 40 + [100] * 10, 512, 8)
    assert (together.prompts, together.chunk) == (40 + 5, 102)


@given(st.lists(st.integers(1, 5000), min_size=1), st.integers(1, 5000), st.integers(1, 64))
def test_something_is_always_fed_and_the_budget_is_kept(left: list[int], budget: int, most: int) -> None:
    together = feed_together(left, budget, most)
    through = sum(tokens == 1 for tokens in left)
    fed = together.prompts - through
    assert fed >= 1 and together.chunk >= 1
    assert fed == 1 or fed * together.chunk <= budget
    assert fed <= max(1, most)
