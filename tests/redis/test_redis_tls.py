"""Redis behind TLS: options in the URL, everything works, and a server that nobody vouches for is refused."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shared.errors import ServiceUnavailableError
from shared.redis.connection.client import require
from tests.redis.api_servers import api
from tests.redis.scripted_worker import MODEL, Answer, working

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")


@pytest.fixture
async def tls_port(redis_url: str, certificate: Path) -> AsyncIterator[int]:
    """A TLS end in front of the test's Redis, which has none of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    inner = urlsplit(redis_url)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection(inner.hostname, inner.port)
        await asyncio.gather(copy(reader, back_writer), copy(back_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_an_api_streams_over_a_redis_behind_tls(tls_port: int, certificate: Path) -> None:
    url = f"rediss://localhost:{tls_port}/0?ssl_ca_certs={certificate}&ssl_check_hostname=True"
    body = {"model": MODEL, "prompt": "hi"}
    async with (
        working(url, lambda spec: Answer("over tls")),
        api(url) as server,
        server.stream("/v1/completions", body) as events,
    ):
        chunks = await events.all()
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "over tls"


@pytest.mark.parametrize("options", ["", "?ssl_ca_certs={cert}&ssl_check_hostname=True"])
async def test_a_server_that_nobody_vouches_for_is_refused(tls_port: int, certificate: Path, options: str) -> None:
    host = "127.0.0.1" if options else "localhost"  # the certificate names localhost alone
    with pytest.raises(ServiceUnavailableError, match=r"(?i)certificate"):
        await require(f"rediss://{host}:{tls_port}/0{options.format(cert=certificate)}", 1.0)
