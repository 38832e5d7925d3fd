"""The table of what a worker has claimed."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shared.frames import TokenEvent
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings
from shared.sequences import Claim, ModelCard, SamplingParams, SequenceClass, SequenceSpec
from worker.claim_plan import claim_plan
from worker.engine.reserved import Reserved, RowTokens, StoredPrompts
from worker.engine.scheduler import Limits
from worker.rows import ClaimedRow, ClaimedRows

SPEC = SequenceSpec("s", "m", (1,), SamplingParams(8, 0))


def claim(attempt: int) -> Claim:
    return Claim(SPEC, "stream", f"0-{attempt}", attempt)


async def test_what_concerns_an_earlier_attempt_leaves_the_newer_one_alone() -> None:
    rows, first, second = ClaimedRows(), claim(1), claim(2)
    rows.add(ClaimedRow.after(first, []))
    rows.add(ClaimedRow.after(second, [TokenEvent("s", 1, 0, [5], [-0.5])]))
    assert not rows.leave(first)
    assert rows.attempt("s", 1) is None
    newer = rows.attempt("s", 2)
    assert newer is not None and newer.unlogged_tokens == 1
    assert not rows.changed.is_set()
    assert rows.leave(second) and not rows.leave(second)
    assert rows.changed.is_set()
    assert "s" not in rows and len(rows) == 0


async def test_rows_may_leave_while_the_table_is_walked() -> None:
    rows = ClaimedRows()
    for number in range(3):
        spec = SequenceSpec(f"s{number}", "m", (1,), SamplingParams(8, 0))
        rows.add(ClaimedRow.after(Claim(spec, "stream", f"0-{number}", 1), []))
    left = [rows.leave(row.claim) for row in rows]
    assert left == [True] * 3


async def test_a_row_that_only_waits_for_its_commit_occupies_no_place() -> None:
    rows = ClaimedRows()
    rows.add(ClaimedRow.after(claim(1), []))
    (row,) = rows.occupying()
    row.occupies_row = False
    assert rows.occupying() == [] and len(rows) == 1


def test_rows_are_counted_by_what_they_can_hold() -> None:
    """100 positions; two rows of 60 each leave none, and 40 where a row keeps its last 30."""
    rows, settings = ClaimedRows(), load(WorkerSettings, [])
    for number in range(2):
        spec = SequenceSpec(f"s{number}", "m", (1,) * 50, SamplingParams(10, 0))
        rows.add(ClaimedRow.after(Claim(spec, "stream", f"0-{number}", 1), []))
    for window, free in ((0, 0), (30, 40)):
        card = ModelCard("m", 1000, 10, (), "", "", kv_bytes_per_token=8, dtype="float32", kv_window=window)
        plan = claim_plan(rows, settings, card, 800, most_rows=settings.max_batch_size)
        assert (plan.kv_tokens, plan.kv_window) == (free, window)


def test_recurrent_states_count_for_each_row() -> None:
    """100 positions; two rows of 20 each leave 40 where each has states of as much as 10 more."""
    rows, settings = ClaimedRows(), load(WorkerSettings, [])
    for number in range(2):
        spec = SequenceSpec(f"s{number}", "m", (1,) * 10, SamplingParams(10, 0))
        rows.add(ClaimedRow.after(Claim(spec, "stream", f"0-{number}", 1), []))
    card = ModelCard("m", 1000, 10, (), "", "", kv_bytes_per_token=8, dtype="float32", kv_state_bytes=80)
    plan = claim_plan(rows, settings, card, 800, most_rows=settings.max_batch_size)
    assert (plan.kv_tokens, plan.kv_state) == (40, 10)


def test_one_prompt_of_each_class_may_be_a_copy_on_its_way() -> None:
    """Of two groups of 50 + 10, in one class and in two, where copies of all do not fit."""
    free = []
    for others in ("interactive", "batch"):
        reserved = Reserved(Limits(10, 1000, 8, 8 * 320), 64, shares=True)
        for number in range(6):
            of: SequenceClass = "interactive" if number < 3 else others
            spec = SequenceSpec(
                f"s{number}", "m", (1,) * 50, SamplingParams(10, 0), group=str(number // 3), sequence_class=of
            )
            reserved.add(RowTokens.of(spec))
        free.append(320 - reserved.bytes // 8)
    assert free == [320 - (3 * 49 + 6 * 11), 320 - (4 * 49 + 6 * 11)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 70), st.booleans()), max_size=12))
def test_what_prompts_begin_with_is_stored_once(drawn: list[tuple[int, int, int, bool]]) -> None:
    """In parts of 64, and only for those that others may have, however rows come and leave."""
    stored, rows = StoredPrompts(), list[RowTokens]()
    for number, (first, second, rest, cache) in enumerate(drawn):
        ids = [first] * 64 + [second] * 64 + [number] * rest + [0]
        row = RowTokens.of(SequenceSpec(f"s{number}", "m", tuple(ids), SamplingParams(10, 0), cache=cache))
        after = stored.positions + stored.more(row)
        stored.add(row)
        assert stored.positions == after
        rows.append(row)
        if rest % 3 == 0:
            stored.remove(rows.pop(0))
    each = [[(row.owner, *row.ids[:end]) for end in range(64, row.shared + 1, 64)] for row in rows]
    parts = Counter(part for of in each for part in of)
    for row, of in zip(rows, each, strict=True):
        assert stored.own(row) == row.shared - 64 * sum(parts[part] > 1 for part in of)
        assert stored.own(row, row.blocks) == row.shared - 64 * len(of), "what one more prompt has, too"
    assert stored.positions == 64 * len(parts) + sum(row.shared % 64 for row in rows)
    assert stored.are_alike() == (2 * stored.positions <= sum(row.shared for row in rows))


def test_a_prompt_that_rows_share_counts_once() -> None:
    """240 positions; three samples of 50 + 10 take 2 x 49 + 3 x 11 of them, as one prompt more counts, and copies 180.

    Where 6 of 8 bytes belong to windows, which each row has, 3 x 60 positions of these take 135 of all layers.
    """
    rows, settings = ClaimedRows(), load(WorkerSettings, [])
    for number in range(3):
        spec = SequenceSpec(f"s{number}", "m", (1,) * 50, SamplingParams(10, 0), group="one")
        rows.add(ClaimedRow.after(Claim(spec, "stream", f"0-{number}", 1), []))
    free = []
    for shares, unshared in ((False, 0), (True, 0), (True, 6)):
        card = ModelCard("m", 1000, 10, (), "", "", kv_bytes_per_token=8, dtype="float32", kv_unshared_bytes=unshared)
        plan = claim_plan(rows, settings, card, 8 * 240, most_rows=settings.max_batch_size, shares=shares)
        free.append(plan.kv_tokens)
    assert free == [60, 240 - (2 * 49 + 33), 240 - ((2 * 49 + 33) * 2 + 180 * 6 + 7) // 8]
