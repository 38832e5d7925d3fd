"""The dashboard: pages over the ring's snapshot, kept current by server-sent events. The browser asks no other server.

`pages.py` and `batches.py` have the pages, `live.py` the events that keep them current, `actions.py` the buttons,
`session.py` who may look and act. `parts.py`, `curves.py` and `samples.py` read what the pages show, `render.py` fills
the templates and sets the headers of every answer, `assets.py` serves scripts and styles. Everything is read from Redis
through the ring; everything shown is escaped.
"""

from fastapi import APIRouter, Depends

from api.ops.dashboard import actions, assets, batches, live, pages, session
from api.ops.dashboard.render import compile_all

router = APIRouter(include_in_schema=False, dependencies=[Depends(compile_all)])
for module in (assets, session, pages, batches, live, actions):
    router.include_router(module.router)
