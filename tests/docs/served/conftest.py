from collections.abc import Iterator

import pytest

from tests.docs.shell import READY, START, Shell


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """The server that README, quickstart and most pages start with the same command."""
    shell = Shell(tmp_path_factory.mktemp("served"))
    server = shell.start(START)
    code = -1
    try:
        server.wait_for_line(READY["serve"])
        assert f"ParaLLM is ready: http://127.0.0.1:{shell.http}/v1" in server.output
        yield shell
    finally:
        code = server.stop()
    assert code == 0
