"""The dashboard: pages over the ring's snapshot, live by server-sent events. Nothing outside this server is asked.

`pages`, `batches` what one looks at · `live` what changes meanwhile · `actions` what one can do · `session` who may ·
`render` templates, and the headers of every answer. Everything is read from Redis through the ring; everything shown is
escaped.
"""

from fastapi import APIRouter

from api.ops.dashboard import actions, assets, batches, live, pages, session
from api.ops.dashboard.render import warm_up

__all__ = ["router", "warm_up"]

router = APIRouter(include_in_schema=False)
for module in (assets, session, pages, batches, live, actions):
    router.include_router(module.router)
