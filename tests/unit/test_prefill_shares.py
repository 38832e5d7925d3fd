"""Which prompts are fed next, and how much of them: pure."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.scheduler import (
    LONG_TOGETHER,
    NARROWEST,
    PASSES,
    SMALLEST_PIECE,
    ChunkSize,
    ClassTurns,
    Feed,
    PieceSizes,
    Unfed,
    feed_next,
    share_prefill,
)


def short_ones(left: list[int], budget: int, most: int = 64) -> Feed:
    return feed_next([Unfed(tokens) for tokens in left], budget, most, after_short=False)


def test_as_many_short_prompts_as_the_budget_feeds_to_their_end_go_together() -> None:
    assert short_ones([127] * 200, 4096) == Feed(tuple(range(4096 // 127)), 127)
    assert len(short_ones([127] * 200, 4096, most=8).prompts) == 8


def test_a_prompt_that_would_pad_the_others_waits_for_the_next_turn() -> None:
    assert short_ones([10, 10, 200, 10], 512) == Feed((0, 1, 3), 10)


def test_a_long_prompt_gets_the_whole_budget_and_never_more_than_it_has() -> None:
    assert short_ones([9000], 512) == Feed((0,), 512)
    assert feed_next([Unfed(30, fed_at=5)], 512, 8, after_short=False) == Feed((0,), 30)


def test_a_long_prompt_goes_in_pieces_that_attention_has_room_for() -> None:
    # A budget for 128 prompts of 128 tokens is no budget for one of 16,384: its scores would take all of a GPU.
    area = 2048 * 2048
    assert feed_next([Unfed(16_384)], 65_536, 128, after_short=False, area=area) == Feed((0,), 2048)
    behind = feed_next([Unfed(9000, fed_at=1, past=6000)], 65_536, 128, after_short=False, area=area)
    assert NARROWEST < behind.chunk < 1024, "the longer its past, the shorter its pieces"
    together = feed_next([Unfed(1024)] * 128, 65_536, 128, after_short=False, area=area)
    assert together == Feed((0, 1, 2, 3), 1024)


def test_short_and_long_prompts_take_turns() -> None:
    prompts = [Unfed(9000, fed_at=1), Unfed(20), Unfed(20)]
    assert feed_next(prompts, 512, 8, after_short=False) == Feed((1, 2), 20)
    assert feed_next(prompts, 512, 8, after_short=True) == Feed((0,), 512)


def test_long_prompts_take_turns_among_themselves() -> None:
    waits = Unfed(9000)
    few = [Unfed(9000, fed_at=at) for at in (3, 1)]
    assert feed_next([*few, waits], 512, 8, after_short=False).prompts == (2,), "the next one begins"
    many = [Unfed(9000, fed_at=at) for at in range(LONG_TOGETHER + 1, 1, -1)]
    assert feed_next([*many, waits], 512, 8, after_short=False).prompts == (LONG_TOGETHER - 1,), "fed longest ago"


@given(
    prompts=st.lists(
        st.builds(Unfed, left=st.integers(1, 5000), fed_at=st.integers(0, 9), past=st.integers(0, 9000)), min_size=1
    ),
    budget=st.integers(1, 5000),
    most=st.integers(1, 64),
    after_short=st.booleans(),
    area=st.none() | st.integers(1, 5000 * 5000),
)
def test_something_is_always_fed_and_the_budget_is_kept(
    prompts: list[Unfed], budget: int, most: int, after_short: bool, area: int | None
) -> None:
    feed = feed_next(prompts, budget, most, after_short=after_short, area=area)
    past = max(prompts[at].past for at in feed.prompts)
    if area is not None and (len(feed.prompts) > 1 or feed.chunk > NARROWEST):
        assert len(feed.prompts) * feed.chunk * (past + feed.chunk) <= area
    assert 1 <= len(feed.prompts) <= most
    assert feed.chunk >= 1
    assert len(feed.prompts) * feed.chunk <= budget
    if len(feed.prompts) > 1:
        assert all(prompts[at].left <= feed.chunk and not prompts[at].fed_at for at in feed.prompts), "to their ends"


def test_interactive_prompts_go_first_and_a_batch_prompt_is_passed_so_often_and_no_more() -> None:
    turns = ClassTurns()
    both = [turns.choose({"interactive", "batch"}) for _ in range(2 * (PASSES + 1))]
    assert both == (["interactive"] * PASSES + ["batch"]) * 2


def test_a_lone_interactive_prompt_never_waits_for_a_batch_s_turn() -> None:
    turns = ClassTurns()
    for _ in range(10):
        assert turns.choose({"batch"}) == "batch"
        assert turns.choose({"interactive", "batch"}) == "interactive"


def paced(fixed_s: float, token_s: float, tokens: list[int]) -> PieceSizes:
    pace = PieceSizes()
    for each in tokens:
        pace.turn(each, fixed_s + token_s * each)
    return pace


def test_a_piece_takes_half_of_what_a_turn_takes_anyway() -> None:
    gpu = paced(0.016, 4e-6, [0, 64, 128, 0, 500, 64, 0])
    assert gpu.piece(16_384) == pytest.approx(2000, abs=2)
    assert gpu.piece(512) == 512, "and never more than the chunk"


def test_a_piece_is_small_where_every_token_costs_time() -> None:
    assert paced(0.006, 1e-4, [0, 64, 128, 0, 500, 64, 0]).piece(512) == SMALLEST_PIECE
    assert PieceSizes().piece(40) == 40


def test_pieces_grow_until_they_tell_what_a_token_takes() -> None:
    pace, sizes = PieceSizes(), []
    for _ in range(200):
        sizes.append(pace.piece(4096))
        pace.turn(sizes[-1], 0.016 + 4e-6 * sizes[-1])
    assert sizes[:2] == [2 * SMALLEST_PIECE, 4 * SMALLEST_PIECE]
    assert all(1900 <= size <= 4096 for size in sizes[-50:])


def test_noise_does_not_keep_pieces_small_where_tokens_cost_next_to_nothing() -> None:
    pace, noise, sizes = PieceSizes(), random.Random(1), []
    for _ in range(400):
        sizes.append(pace.piece(4096))
        pace.turn(sizes[-1], 0.016 + 4e-6 * sizes[-1] + noise.gauss(0, 0.002))
    assert statistics.median(sizes[100:]) >= 1000


def chunk_after(*turns: tuple[int, float]) -> ChunkSize:
    """A chunk of 512 tokens, planned to take 50 ms."""
    size = ChunkSize(512, 0.05)
    for tokens, seconds in turns:
        size.turn(tokens, seconds)
    return size


def test_a_late_piece_makes_the_next_one_smaller_in_proportion() -> None:
    assert chunk_after((512, 0.15)).tokens == 512 // 3
    assert chunk_after((512, 9.0)).tokens == 512 // 4, "one hiccup of the machine does not say more"
    assert chunk_after(*[(512, 9.0)] * 5).tokens == SMALLEST_PIECE
    assert chunk_after((512, 0.09)).tokens == 512, "that is noise"


def test_what_the_decode_step_takes_is_not_the_piece_s_fault() -> None:
    assert chunk_after((0, 0.2), (0, 0.2), (512, 0.26)).tokens == 512
    assert chunk_after((0, 0.2), (0, 0.2), (512, 0.4)).tokens == 512 // 4


def test_several_chunks_at_once_may_take_their_time() -> None:
    assert chunk_after((4 * 512, 0.3)).tokens == 512
    assert chunk_after((4 * 512, 0.8)).tokens == 512 // 4


def test_pieces_in_time_let_the_chunk_grow_back_and_not_beyond() -> None:
    size = chunk_after(*[(512, 9.0)] * 5)
    sizes = [size.tokens]
    for _ in range(12):
        size.turn(size.tokens, 0.02)
        sizes.append(size.tokens)
    assert sizes == sorted(sizes)
    assert sizes[-1] == 512


def test_a_short_prompt_says_nothing_of_a_whole_piece() -> None:
    size = chunk_after((512, 9.0))
    size.turn(10, 0.001)
    assert size.tokens == 128


def test_a_chunk_that_a_person_has_named_stays() -> None:
    size = ChunkSize(512, float("inf"))
    size.turn(512, 100.0)
    assert size.tokens == 512
    few = ChunkSize(16, 0.05)
    few.turn(16, 9.0)
    assert few.tokens == 16, "never more than the chunk"


def test_prefill_is_shared_between_batch_and_lane() -> None:
    both = share_prefill(512, batch_waits=True, lane_waits=True)
    assert both.batch + both.lane == 512
    assert share_prefill(512, batch_waits=True, lane_waits=False).batch == 512
    assert share_prefill(512, batch_waits=False, lane_waits=True).lane == 512
