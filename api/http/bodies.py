"""Routes with bodies: a long one of JSON is read and checked off the event loop, in the turn of its key."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response

from api.callers.fair_pool import aside
from api.http.errors import BodyError, from_validation
from shared.errors import ParallmError

LONG_BYTES = 16 << 10  # of a body: it may take some 10 ms from here on


class BodyRoute(APIRoute):
    """A route whose body is a `RequestModel`, or which reads it by itself."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's hook by which a route reads its requests."""
        handle, field = super().get_route_handler(), self.body_field
        body: TypeAdapter[Any] | None = None
        if field is not None:
            body = TypeAdapter(field.field_info.annotation or Any)

        async def handled(request: Request) -> Response:
            reads = _BodyRequest(request, body)
            try:
                return await handle(reads)
            except Exception as error:
                await self.refused(reads, error)
                raise

        return handled

    async def refused(self, request: Request, error: Exception) -> None:
        """Called with whatever a request ends in, before it is answered; for routes that keep books of it."""


class _BodyRequest(Request):
    """A request whose long body is given to FastAPI as the validated model instead of as JSON."""

    def __init__(self, request: Request, model: TypeAdapter[Any] | None) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def body(self) -> bytes:
        """As `BodyLimit` hands it on, in one piece: Starlette would copy it in the event loop, 64 MB of it even."""
        if not hasattr(self, "_body"):
            self._body = b"".join([piece async for piece in self.stream() if piece])
        return self._body

    async def json(self) -> Any:
        body = await self.body()
        if self._model is None or len(body) <= LONG_BYTES:
            return await super().json()
        try:
            return await aside(self._read, self._model, body)
        except ParallmError as error:
            raise BodyError(error) from error

    @staticmethod
    def _read(model: TypeAdapter[Any], body: bytes) -> Any:
        try:
            return model.validate_python(json.loads(body))
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False)) from None
