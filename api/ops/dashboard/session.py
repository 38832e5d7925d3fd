"""Who may look and act. With API keys set a person signs in with one; without, the dashboard is as open as the API.

The cookie holds a time of expiry and its signature under a secret made of that key's digest, so every api process can
check it and none keeps a list. It is HttpOnly, SameSite=Strict and only for /dashboard. A request that changes
something must come from one of our pages: browsers send Origin or Sec-Fetch-Site, and a request without either is
refused.
"""

import asyncio
import hashlib
import hmac
import time
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Form, Request
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response

from api.callers.caller import ApiKey
from api.http.api_keys import KeyRing
from api.http.auth import presented
from api.ops.dashboard.render import Page, page
from shared.errors import AuthenticationError, ForbiddenError

router = APIRouter(prefix="/dashboard")

COOKIE = "parallm_dashboard"
SESSION_S = 12 * 3600
WRONG_KEY_S = 0.5  # what a wrong key costs


def may_look(request: Request) -> None:
    """A dependency: AuthenticationError unless the request carries a session, or the key as the API takes it."""
    keys = keys_of(request)
    if not keys or _is_signed(request.cookies.get(COOKIE, ""), keys) or _looks(keys.find(presented(request.headers))):
        return
    raise AuthenticationError("sign in first")


def _looks(key: ApiKey | None) -> bool:
    """True if a request with this key may see the pages, which show the things of all tenants."""
    return key is not None and not key.asker.limited


def may_act(request: Request) -> None:
    """A dependency of everything that changes something."""
    may_look(request)
    from_our_page(request.headers)


def from_our_page(headers: Headers) -> None:
    """ForbiddenError unless the browser says that the request comes from this very server."""
    origin = headers.get("origin", "")
    if origin and origin != "null":
        ours = urlsplit(origin).netloc == headers.get("host", "")
    else:
        ours = headers.get("sec-fetch-site", "") == "same-origin"
    if not ours:
        raise ForbiddenError("this was not asked for by a page of this server")


@router.get("/login")
async def login_form(request: Request, next: str = "/dashboard") -> Response:
    """Form in which a person enters an API key."""
    return page(request, "login.html", Page("Sign in", ""), next=_inside(next), wrong="")


@router.post("/login")
async def login(
    request: Request,
    key: Annotated[str, Form()] = "",
    next: Annotated[str, Form()] = "/dashboard",
) -> Response:
    """Check the key and begin a session."""
    from_our_page(request.headers)
    keys = keys_of(request)
    known = keys.find(key.strip())
    if keys and not _looks(known):
        await asyncio.sleep(WRONG_KEY_S)
        wrong = (
            "That is a tenant's key: the dashboard shows all tenants' work and takes an admin's."
            if known
            else "That is not the key."
        )
        return page(request, "login.html", Page("Sign in", ""), status=401, next=_inside(next), wrong=wrong)
    response = RedirectResponse(_inside(next), 303)
    if known is not None:
        until = int(time.time()) + SESSION_S
        response.set_cookie(
            COOKIE,
            f"{until}.{_signature(until, known)}",
            max_age=SESSION_S,
            path="/dashboard",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
    return response


@router.post("/logout")
async def logout(request: Request) -> Response:
    """End the session in this browser."""
    from_our_page(request.headers)
    response = RedirectResponse("/dashboard/login", 303)
    response.delete_cookie(COOKIE, path="/dashboard", httponly=True, samesite="strict")
    return response


def keys_of(request: Request) -> KeyRing:
    """The keys of this server."""
    keys: KeyRing = request.app.state.keys
    return keys


def _signature(until: int, key: ApiKey) -> str:
    secret = hashlib.sha256(b"parallm dashboard " + key.digest).digest()
    return hmac.new(secret, str(until).encode(), "sha256").hexdigest()


def _is_signed(cookie: str, keys: KeyRing) -> bool:
    until, _, signature = cookie.partition(".")
    if not (until.isascii() and until.isdigit()) or len(until) > 12 or int(until) < time.time():
        return False
    signatures = [_signature(int(until), key).encode() for key in keys if _looks(key)]
    return sum(hmac.compare_digest(signature.encode(), ours) for ours in signatures) > 0  # looks at all of them


def _inside(address: str) -> str:
    """The address if it is one of our pages: no person is sent elsewhere after signing in."""
    ours = address == "/dashboard" or address.startswith("/dashboard/")
    return address if ours and "\\" not in address and not any(ord(c) < 32 for c in address) else "/dashboard"
