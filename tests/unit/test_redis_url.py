"""A start without Redis fails soon, and says which Redis it was."""

import socket

import pytest

from shared.errors import ServiceUnavailableError, SetupError
from shared.redis.connection.client import require


async def test_a_malformed_url_is_a_wrong_setting() -> None:
    with pytest.raises(SetupError, match="--redis foo"):
        await require("foo")


async def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(ServiceUnavailableError, match=rf"redis://\*\*\*@127\.0\.0\.1:{port}/0") as caught:
            await require(f"redis://:secret@127.0.0.1:{port}/0", within_s=0.2)
    assert "secret" not in str(caught.value)
