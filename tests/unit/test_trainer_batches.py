from dataclasses import replace

import numpy as np
import pytest

from tests.unit.trainer_samples import group, trajectory
from trainer.learn.batches import (
    DroppedCounts,
    Padding,
    Sample,
    SampleGroup,
    loss_mask,
    microbatches,
    pad,
    sample_groups,
)


def sample(*ids: int, mask: tuple[bool, ...] = (), advantage: float = 1.0) -> Sample:
    return Sample(ids, tuple(-float(i) for i in ids), mask or (True,) * len(ids), (3,) * len(ids), advantage)


def test_groups_without_variance_are_dropped_and_counted() -> None:
    batch = [group(trajectory(1.0), trajectory(1.0)), group(trajectory(1.0), trajectory(0.0), index=1)]
    kept, dropped = sample_groups(batch, {})
    assert [g.id for g in kept] == ["run-1"]
    assert [s.advantage for s in kept[0].samples] == [0.5, -0.5]
    assert dropped == DroppedCounts(zero_variance=1)


def test_for_a_value_head_equal_rewards_and_single_samples_teach_and_others_advantages_do_not() -> None:
    judged = replace(group(trajectory(1.0), trajectory(0.0), index=3), advantages=(2.0, -2.0))
    batch = [group(trajectory(1.0), trajectory(1.0)), group(trajectory(0.5), index=1), group(trajectory(None), index=2)]
    kept, dropped = sample_groups([*batch, judged], {}, scale=None)
    assert [[s.advantage for s in each.samples] for each in kept] == [[1.0, 1.0], [0.5]]
    assert dropped == DroppedCounts(failed=3, too_few=2)


def test_failed_and_unscored_samples_are_left_out_of_the_baseline() -> None:
    batch = [
        group(trajectory(1.0), trajectory(0.0), trajectory(9.0, finish="error"), trajectory(None)),
        group(trajectory(1.0), trajectory(None), index=1),
    ]
    kept, dropped = sample_groups(batch, {})
    assert [s.advantage for s in kept[0].samples] == [0.5, -0.5]
    assert dropped == DroppedCounts(failed=3, too_few=1)


def test_an_overlong_sample_counts_in_the_baseline_but_not_in_the_loss() -> None:
    batch = [group(trajectory(1.0), trajectory(0.0), trajectory(0.5, finish="length"))]
    kept, dropped = sample_groups(batch, {})
    assert [s.advantage for s in kept[0].samples] == [0.5, -0.5]  # the mean, 0.5, includes it
    assert dropped.overlong == 1
    kept, _ = sample_groups(batch, {}, mask_overlong=False)
    assert len(kept[0].samples) == 3


def test_a_tools_words_stay_out_of_the_loss() -> None:
    own = trajectory(1.0, (5, 6, 7, 8), loss_mask=(1, 0, 0, 1))
    kept, _ = sample_groups([group(own, trajectory(0.0))], {})
    assert kept[0].samples[0].mask == (True, False, False, True)
    assert pad(kept).mask_BT.tolist() == [[True, False, False, True], [True, True, False, False]]


def test_lengths_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="2 completion tokens, 1 logprobs"):
        loss_mask(trajectory(logprobs=[-1.0]))


def test_every_token_knows_the_policy_step_that_sampled_it() -> None:
    mixed = trajectory(1.0, (5, 6, 7), spans=[("policy@4", 0, 2), ("policy@6", 2, 3)])
    kept, _ = sample_groups([group(mixed, trajectory(0.0))], {"policy@4": 2, "policy@6": 3})
    assert kept[0].samples[0].policy_steps == (2, 2, 3)
    assert kept[0].samples[1].policy_steps == (0, 0)


def test_prompts_are_padded_left_and_completions_right() -> None:
    groups = [
        SampleGroup("a", (1, 2, 3), (sample(7, 8), sample(9, advantage=-1.0))),
        SampleGroup("b", (4,), (sample(5, 6, 7, mask=(True, False, True)),)),
    ]
    batch = pad(groups, Padding(4, 4))
    assert batch.prompt_PS.tolist() == [[0, 1, 2, 3], [0, 0, 0, 4]]
    assert batch.padding_P.tolist() == [1, 3]
    assert batch.prompt_of_B.tolist() == [0, 0, 1]
    assert batch.completion_BT.tolist() == [[7, 8, 0, 0], [9, 0, 0, 0], [5, 6, 7, 0]]
    assert batch.mask_BT.tolist() == [
        [True, True, False, False],
        [True, False, False, False],
        [True, False, True, False],
    ]
    assert batch.sampler_BT.tolist() == [[-7, -8, 0, 0], [-9, 0, 0, 0], [-5, 0, -7, 0]]
    assert batch.policy_step_BT.tolist() == [[3, 3, -1, -1], [3, -1, -1, -1], [3, -1, 3, -1]]
    assert batch.advantage_B.tolist() == [1, -1, 1]


def test_rows_that_fill_up_are_in_no_loss_and_few_counts_occur() -> None:
    groups = [SampleGroup(str(i), (1, 2), tuple(sample(7, 8) for _ in range(2))) for i in range(9)]
    plain, padded = pad(groups), pad(groups, Padding(rows=True))
    assert (len(padded.prompt_PS), len(padded.mask_BT)) == (10, 20)
    assert not padded.mask_BT[18:].any() and not padded.advantage_B[18:].any()
    assert padded.completion_BT[:18].tolist() == plain.completion_BT.tolist()
    assert (padded.tokens, padded.positions) == (plain.tokens, plain.positions)
    counts = {len(pad(groups[:1] * count, Padding(rows=True)).prompt_PS) for count in range(64, 129)}
    assert counts == {64, 80, 96, 112, 128}


def test_a_layout_is_another_where_other_operations_compute_it() -> None:
    def of(*counts: int) -> tuple[int, ...]:
        return pad([SampleGroup(str(at), (1, 2), (sample(7, 8),) * count) for at, count in enumerate(counts)]).layout

    assert of(1, 5) == of(2, 4), "each prompt's keys are repeated by themselves"
    assert of(3, 3) != of(2, 4), "those of all prompts at once"
    assert len({of(3, 3), of(2, 2), of(2, 2, 2)}) == 3


def test_microbatches_keep_to_the_budget_and_lose_no_sample() -> None:
    groups = [SampleGroup(str(i), (1,) * (i + 1), tuple(sample(2, 3) for _ in range(4))) for i in range(6)]
    batches = list(microbatches(groups, lambda: 12))
    assert all(sum(part.tokens for part in batch) <= 12 for batch in batches)
    counts = {g.id: 0 for g in groups}
    for batch in batches:
        for part in batch:
            counts[part.id] += len(part.samples)
    assert counts == {g.id: 4 for g in groups}


def test_a_part_of_the_next_group_fills_a_microbatch_unless_its_prompt_is_most_of_it() -> None:
    groups = [SampleGroup(str(i), (1,) * 8, tuple(sample(*range(8)) for _ in range(8))) for i in range(3)]  # 72 each
    cut = [[len(part.samples) for part in batch] for batch in microbatches(groups, lambda: 104)]
    assert cut == [[8, 3], [5, 6], [2]], "104, 104 and 24 positions"
    assert [len(batch) for batch in microbatches(groups, lambda: 96)] == [1, 1, 1], "8 of 24 would be prompt"


def test_a_long_sample_does_not_pad_many_short_ones() -> None:
    short = [SampleGroup(f"s{i}", (1,) * 4, tuple(sample(*range(4)) for _ in range(8))) for i in range(8)]
    long = [SampleGroup(f"l{i}", (1,) * 8, tuple(sample(*range(100)) for _ in range(8))) for i in range(2)]
    for size in (4096, 800, 300):
        batches = list(microbatches(short + long, lambda size=size: size))
        assert sum(pad(batch).completion_BT.size for batch in batches) == 64 * 4 + 16 * 100
    near = [replace(short[0], id="n", samples=(sample(*range(6)),) * 8), *short]
    assert len(list(microbatches(near, lambda: 4096))) == 1, "6 ids beside 4 are little padding"


def test_a_sample_larger_than_the_budget_stands_alone() -> None:
    batches = microbatches([SampleGroup("a", (1,), (sample(*range(50)), sample(1)))], lambda: 8)
    assert [[len(part.samples) for part in batch] for batch in batches] == [[1], [1]]


def test_masked_positions_hold_no_sampler_logprob() -> None:
    # A tool's tokens have none: whatever stands there must not reach the ratio.
    odd = Sample((5, 6), (-1.0, float("nan")), (True, False), (0, 0), 1.0)
    assert np.isfinite(pad([SampleGroup("a", (1,), (odd,))]).sampler_BT).all()


def test_groups_that_are_all_cut_off_are_counted_and_the_first_failure_is_kept() -> None:
    cut = group(trajectory(1.0, finish="length"), trajectory(0.0, finish="length"))
    late = group(trajectory(1.0, finish="deadline"), trajectory(1.0), trajectory(0.0), index=1)
    kept, dropped = sample_groups([cut, late], {})
    assert [g.id for g in kept] == ["run-1"]
    assert dropped == DroppedCounts(overlong=2, cut_off=1, failed=1)
    assert dropped.problem == "it ended with 'deadline' after 2 tokens"
