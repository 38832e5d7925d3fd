"""One try of one webhook: signed, to the address that was looked at, and nowhere else.

The headers are those of Standard Webhooks, which the openai package checks (`client.webhooks.unwrap`). The host's name
is resolved here, every address is looked at, and the connection goes to one of these addresses: a name that answers
otherwise a moment later gains nothing. No redirect is followed, no proxy asked, and the answer's body is not read.
"""

import asyncio
import base64
import hashlib
import hmac
import time

import httpx

from api.checks.public_addresses import addresses_of, is_public
from api.webhooks.body import secret_bytes
from shared.errors import ParallmError

TRY_S = 10.0  # for all of it


class NotSentError(ParallmError):
    """A try that failed; the message shows neither the path nor the secret."""


def headers(event_id: str, payload: bytes, secret: str, now: int) -> dict[str, str]:
    """Id, time and signature of a message."""
    signed = b"%s.%d.%s" % (event_id.encode(), now, payload)
    digest = hmac.new(secret_bytes(secret), signed, hashlib.sha256).digest()
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(now),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
        "content-type": "application/json",
        "user-agent": "ParaLLM",
    }


async def send(client: httpx.AsyncClient, url: str, secret: str, event_id: str, payload: bytes, private: bool) -> None:
    """Send it once; NotSentError unless it was taken (2xx)."""
    target = httpx.URL(url)
    try:
        async with asyncio.timeout(TRY_S):
            signed = headers(event_id, payload, secret, int(time.time()))
            answer = await _sent(client, target, await _addresses(target, private), payload, signed)
    except TimeoutError:
        raise NotSentError(f"no answer within {TRY_S:.0f} s") from None
    except (httpx.HTTPError, OSError) as error:  # their words may have the URL in them
        raise NotSentError(type(error).__name__) from None
    if not answer.is_success:
        raise NotSentError(f"it answered {answer.status_code}")


async def _sent(
    client: httpx.AsyncClient, target: httpx.URL, addresses: list[str], payload: bytes, signed: dict[str, str]
) -> httpx.Response:
    """The answer of the first address that takes a connection, without its body."""
    while True:
        request = client.build_request(
            "POST",
            target.copy_with(host=addresses.pop(0)),
            content=payload,
            headers={**signed, "host": target.netloc.decode()},
            extensions={"sni_hostname": target.host},
        )
        try:
            answer = await client.send(request, stream=True)
        except httpx.ConnectError:
            if not addresses:
                raise
        else:
            await answer.aclose()
            return answer


async def _addresses(target: httpx.URL, private: bool) -> list[str]:
    """Addresses of the host, each once; NotSentError when one of them is private and none may be."""
    port = target.port or (443 if target.scheme == "https" else 80)
    addresses = await addresses_of(target.host, port)
    if not private and not all(map(is_public, addresses)):
        raise NotSentError("its address is private (--webhook-private)")
    return addresses
