"""Webhooks: who may be called, at which address, and what proves whom a message is from."""

import base64
import secrets
import time

import openai
import pytest
from pydantic import ValidationError

from api.checks.public_addresses import is_public
from api.webhooks.body import WebhookBody, refusal
from api.webhooks.sending import headers
from api.webhooks.work import FIRST_S, LONGEST_S, pause_after
from shared.errors import SetupError
from shared.process.api_settings import ApiSettings
from shared.process.settings import load
from shared.webhooks import Webhook

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef01234567").decode()


@pytest.mark.parametrize("secret", [SECRET, "a text that is long enough"])
def test_the_openai_package_takes_what_is_signed(secret: str) -> None:
    payload = b'{"object":"event","id":"evt_1","type":"response.completed","created_at":1,"data":{"id":"resp_1"}}'
    signed = headers("evt_1", payload, secret, int(time.time()))
    client = openai.OpenAI(api_key="none", webhook_secret=secret)
    event = client.webhooks.unwrap(payload, signed)
    assert (event.type, event.data.id) == ("response.completed", "resp_1")  # type: ignore[union-attr]
    for wrong in (
        (payload + b" ", signed),
        (payload, {**signed, "webhook-id": "evt_2"}),
        (payload, headers("evt_1", payload, secret, int(time.time()) - 3600)),
        (payload, headers("evt_1", payload, "another secret of its own", int(time.time()))),
    ):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(*wrong)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://hooks.example.com/x?y=1", ""),
        ("https://HOOKS.example.com:443/x", ""),
        ("https://a.b.example.org/", ""),
        ("https://local.example:8443/", ""),
        ("http://hooks.example.com/", "must begin"),
        ("https://example.org/", "does not send"),
        ("https://evil-example.org/", "does not send"),
        ("https://hooks.example.com.evil.org/", "does not send"),
        ("https://hooks.example.com:8443/", "does not send"),
        ("https://local.example/", "does not send"),
        ("https://user:pass@hooks.example.com/", "neither a user"),
        ("https://hooks.example.com@evil.org/", "neither a user"),
        ("https://hooks.example.com/#x", "nor a fragment"),
        ("https:///x", "must begin"),
        ("file:///etc/passwd", "must begin"),
        ("https://hooks.example.com/\r\nx: y", ""),
        ("nonsense", "must begin"),
    ],
)
def test_only_hosts_that_the_operator_names_are_called(url: str, why: str) -> None:
    hosts = ["hooks.example.com", "*.example.org", "local.example:8443"]
    found = refusal(url, ApiSettings(webhook_hosts=hosts))
    assert found if "\r" in url else (why in found and bool(found) == bool(why))
    if url.startswith("http://"):
        assert refusal(url, ApiSettings(webhook_hosts=hosts, webhook_private=True)) == ""


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.215.14", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b:1::7f00:1", False),
        ("::127.0.0.1", False),
        ("fec0::1", False),
    ],
)
def test_private_addresses_are_known_in_every_disguise(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_tries_come_more_and_more_seldom() -> None:
    for passed_s, about in ((0, FIRST_S), (4, FIRST_S), (60, 60), (10**6, LONGEST_S)):
        assert 0.8 * about <= pause_after(passed_s) <= 1.2 * about


@pytest.mark.parametrize("secret", ["short", "whsec_", "whsec_!!!", "x" * 200])
def test_a_secret_that_protects_nothing_is_refused_and_not_told(secret: str) -> None:
    with pytest.raises(ValidationError) as raised:
        WebhookBody.model_validate({"url": "https://a", "secret": secret})
    assert raised.value.errors()[0]["loc"] == ("secret",)


def test_a_secret_is_in_no_repr() -> None:
    secret = secrets.token_hex(16)
    body = WebhookBody.model_validate({"url": "https://a/path", "secret": secret})
    assert secret not in repr(body) and secret not in repr(Webhook("https://a/path", secret))


@pytest.mark.parametrize("host", ["https://a.b", "a/b", "*", "a:x", ""])
def test_a_host_that_is_none_is_a_wrong_setting(host: str) -> None:
    with pytest.raises(SetupError, match="webhook_hosts"):
        load(ApiSettings, ["--webhook-hosts", f'["{host}"]'])
