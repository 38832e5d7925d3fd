from collections.abc import Iterator

import pytest

from tests.e2e.keyed import KEY
from tests.e2e.rings import Ring, ring


@pytest.fixture(scope="package")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """A ring that wants a key, for all of this folder."""
    with ring(tmp_path_factory.mktemp("ring"), "--api-key", KEY) as started:
        yield started
