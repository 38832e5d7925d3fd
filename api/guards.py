"""What stands between a connection and the routes, from the outside in: host, CORS, origin, key, admission, body."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from api.admission import Admission
from api.auth import OwnOrigin, RequireKey
from api.hosts import OwnHost, allowed_hosts
from api.key_ring import KeyRing
from api.limits import BodyLimit
from shared.settings import ApiSettings


def guard(app: FastAPI, settings: ApiSettings) -> None:
    """Put the guards in front of the app; the last added stands outermost."""
    app.add_middleware(BodyLimit, settings)
    app.add_middleware(Admission, settings)
    keys = app.state.keys = KeyRing.of(settings)
    if keys:
        app.add_middleware(RequireKey, keys)
    else:
        app.add_middleware(OwnOrigin, settings.cors_origins)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-next-after", "x-parallm-unused-parameters"],
        )
    hosts = allowed_hosts(settings, keys=bool(keys))
    if hosts is not None:
        app.add_middleware(OwnHost, hosts)
