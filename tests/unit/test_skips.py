"""The summary of a run says why tests were skipped."""

import pytest

from tests.conftest import why_skipped


def skipped(file: str, test: str, reason: str) -> pytest.TestReport:
    where = (file, 1, f"Skipped: {reason}")
    return pytest.TestReport(f"{file}::{test}", (file, 1, test), {}, "skipped", where, "setup")


def test_each_reason_has_a_line_with_its_count_and_files() -> None:
    reports = [
        skipped("tests/b.py", "two", "no browser"),
        skipped("tests/c.py", "one", "needs a GPU"),
        skipped("tests/a.py", "one", "needs a GPU"),
        skipped("tests/a.py", "two", "needs a GPU"),
    ]
    assert why_skipped(reports) == [
        "SKIPPED   3 needs a GPU (tests/a.py, tests/c.py)",
        "SKIPPED   1 no browser (tests/b.py)",
    ]
