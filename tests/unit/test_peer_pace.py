"""Whether KV is fetched or computed: by what both have taken lately."""

from worker.peers.pace import LEAST_IDS, FetchSize, goes_on, is_quicker

JOB = FetchSize(ids=1000, nbytes=100_000_000)


def test_what_is_quicker_by_the_measures_is_done() -> None:
    assert is_quicker(JOB, token_s=1e-3, bytes_per_s=1e9), "a second of computing against a tenth"
    assert not is_quicker(JOB, token_s=1e-4, bytes_per_s=1e9), "a tenth, and what asking takes"
    assert not is_quicker(JOB, token_s=1e-3, bytes_per_s=5e7)


def test_without_a_measure_a_transfer_begins_and_is_judged_by_its_first_parcel() -> None:
    assert is_quicker(JOB, token_s=0, bytes_per_s=1) and is_quicker(JOB, token_s=1e-9, bytes_per_s=0)
    assert goes_on(JOB, 1_000_000, seconds=0.001, token_s=1e-3)
    assert not goes_on(JOB, 1_000_000, seconds=0.02, token_s=1e-3)
    assert goes_on(JOB, 1_000_000, seconds=0.02, token_s=0), "nothing says that computing is quicker"
    assert goes_on(JOB, JOB.nbytes, seconds=99, token_s=1e-3), "there is nothing left to save"


def test_what_is_short_is_computed() -> None:
    assert not is_quicker(FetchSize(LEAST_IDS - 1, 1), token_s=1.0, bytes_per_s=1e9)
