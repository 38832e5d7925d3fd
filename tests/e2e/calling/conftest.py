from collections.abc import Iterator

import pytest

from tests.e2e.calling.tool_model import write_tool_model
from tests.e2e.rings import MODEL, Ring, ring


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """A model that can call tools and reason, for all of this folder; Claude's names stand for it, too."""
    folder = write_tool_model(tmp_path_factory.mktemp("model") / MODEL)
    with ring(tmp_path_factory.mktemp("ring"), "--model-alias", f"claude-*={MODEL}", model=folder) as started:
        yield started
