from collections.abc import Iterator

import pytest

from tests.e2e.rings import Ring, ring


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """One worker, one api, one job runner, for the tests of a module that leave the processes alone."""
    with ring(tmp_path_factory.mktemp("ring")) as started:
        yield started
