from collections.abc import Iterator

import pytest

from tests.e2e.rings import Ring, ring


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """One worker, one api, one job runner, for all of this folder."""
    with ring(tmp_path_factory.mktemp("ring")) as started:
        yield started
