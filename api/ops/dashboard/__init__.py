"""The dashboard: pages over the ring's snapshot, kept current by server-sent events. The browser asks no other server.

`pages.py` and `batches.py` have the pages, `live.py` the events that keep them current, `actions.py` the buttons,
`session.py` who may look and act. `parts.py`, `curves.py` and `samples.py` read what the pages show, `render.py` fills
the templates and sets the headers of every answer, `assets.py` serves scripts and styles. Everything is read from Redis
through the ring; everything shown is escaped.
"""

from fastapi import APIRouter

from api.ops.dashboard import actions, assets, batches, live, pages, session
from api.ops.dashboard.render import warm_up

__all__ = ["router", "warm_up"]

router = APIRouter(include_in_schema=False)
for module in (assets, session, pages, batches, live, actions):
    router.include_router(module.router)
