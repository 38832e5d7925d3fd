"""Templates, how figures are written, and what every answer of the dashboard carries.

Jinja escapes everything; nothing is marked as safe. The content security policy lets scripts and styles come from this
server's files alone, so that even a hole in the escaping would run nothing.
"""

import functools
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import jinja2
from fastapi import Request
from fastapi.routing import APIRoute
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response

from api.http.errors import translate
from api.ops.dashboard.assets import address
from api.ops.dashboard.parts import eta_ms
from api.ops.sizes import size
from shared.errors import AuthenticationError, ParallmError
from shared.night import OUTCOMES

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Page:
    """Title and state that the common frame shows."""

    title: str
    section: str  # which entry of the menu is lit; "": no menu
    events: str = ""  # where its live parts come from


def page(request: Request, template: str, about: Page, *, status: int = 200, **values: Any) -> Response:
    """A whole page of HTML, frame included."""
    keyed = bool(request.app.state.keys)
    text = _templates.get_template(template).render(page=about, keyed=keyed, **values)
    return HTMLResponse(text, status, HEADERS)


def part(template: str, **values: Any) -> str:
    """A piece of a page."""
    return _templates.get_template(f"parts/{template}.html").render(**values)


def notice(message: str, *, wrong: bool = False, status: int = 200, instead_of: str = "") -> Response:
    """The answer to an action; `instead_of`: what else on the page it takes the place of, by its id."""
    return HTMLResponse(part("notice", message=message, wrong=wrong, instead_of=instead_of), status, HEADERS)


class DashboardRoute(APIRoute):
    """A route whose errors are pages for people."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's hook, by which errors become pages."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except (ParallmError, HTTPException, RedisError) as error:
                return _error(request, translate(request, error))

        return handled


def _error(request: Request, error: ParallmError) -> Response:
    by_htmx = request.headers.get("hx-request") == "true"
    if isinstance(error, AuthenticationError):
        if by_htmx:
            return Response(status_code=401, headers={**HEADERS, "HX-Redirect": "/dashboard/login"})
        if request.headers.get("accept", "").startswith("text/event-stream"):
            return Response(status_code=401, headers=HEADERS)
        return RedirectResponse(f"/dashboard/login?next={quote(request.url.path)}", 303, HEADERS)
    if by_htmx:
        return notice(error.message, wrong=True, status=error.status)
    return page(request, "error.html", Page("Not here", "none"), status=error.status, error=error)


@functools.cache
def compile_all() -> None:
    """All templates, before the first page: a process whose pages are not opened starts 0.1 s sooner.

    FastAPI calls what is not async in a thread, so that no stream of the process is held up for long.
    """
    for name in _templates.list_templates():
        _templates.get_template(name)


# -- how figures are written


def number(value: float | None, digits: int = 3) -> str:
    """Short: 1234567 -> 1.23M; None -> an en dash."""
    if value is None:
        return "–"
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.{digits}g}{suffix}"
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def duration(milliseconds: float | None) -> str:
    """A span of time in the unit that suits its length."""
    if milliseconds is None:
        return "–"
    seconds = milliseconds / 1000
    if seconds < 1:
        return f"{milliseconds:.0f} ms"
    if seconds < 60:
        return f"{f'{seconds:.1f}'.removesuffix('.0')} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 60:
        large, small = f"{minutes} min", int(seconds % 60)
        return f"{large} {small} s" if small else large
    large, small, unit = (f"{hours} h", minutes % 60, "min") if hours < 48 else (f"{hours // 24} d", hours % 24, "h")
    return f"{large} {small} {unit}" if small else large


def ago(at_ms: float, now_ms: float | None = None) -> str:
    """Since a moment; "never" for 0."""
    if not at_ms:
        return "never"
    passed = max(0.0, (now_ms or time.time() * 1000) - at_ms)
    return "now" if passed < 1000 else f"{duration(passed // 1000 * 1000)} ago"


def moment(at_ms: float) -> str:
    """A time of day in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ms / 1000)) if at_ms else "–"


def shortened(name: str, letters: int = 22) -> str:
    """The beginning of a long id."""
    return name if len(name) <= letters else name[:letters] + "…"


def percent(share: float | None) -> float:
    """0 to 100, for bars."""
    return round(100 * min(1.0, max(0.0, share or 0.0)), 2)


_templates = jinja2.Environment(
    loader=jinja2.PackageLoader("api.ops.dashboard"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_templates.filters.update(
    eta=eta_ms,
    number=number,
    size=size,
    duration=duration,
    ago=ago,
    moment=moment,
    percent=percent,
    shortened=shortened,
)
_templates.globals.update(asset=address, outcomes=OUTCOMES)
