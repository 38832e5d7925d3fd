"""What everybody draws with: it may never change, or nothing drawn earlier can be drawn again."""

from shared.seeds import derived_seed, seed_in_job, seed_in_request
from shared.sequences import vocabulary_error


def test_seeds_are_what_they_have_always_been() -> None:
    assert (seed_in_request(5, 0), seed_in_request(5, 3)) == (5, 6532028347405268036)
    assert seed_in_job(1, 2, 3) == 1491535104594699
    assert derived_seed(1, "group", 2) == 1153845081227840387


def test_the_first_token_that_is_not_the_models_is_named() -> None:
    assert vocabulary_error([], 8) is None
    assert vocabulary_error([0, 7], 8) is None
    assert vocabulary_error({0: 1.0, 7: -1.0}, 8) is None
    error = vocabulary_error([0, 8, -1], 8, "prompts", "prompts[2]")
    assert error is not None
    assert (error.message, error.param) == ("prompts[2]: token id 8 is not in the vocabulary of 8", "prompts")
    assert vocabulary_error([-1], 8) is not None
