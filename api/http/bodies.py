"""Routes with JSON bodies: a long one is read and checked beside the event loop, in the turn of its key."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response

from api.http.errors import BodyError, from_validation
from api.ring.room import aside
from shared.errors import ParallmError

LONG_BYTES = 16 << 10  # of a body: it may take some 10 ms from here on


class BodyRoute(APIRoute):
    """A route whose body is a `RequestModel`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's hook."""
        handle, field = super().get_route_handler(), self.body_field
        if field is None:
            return handle
        body: TypeAdapter[Any] = TypeAdapter(field.field_info.annotation or Any)

        async def handled(request: Request) -> Response:
            return await handle(_BodyRequest(request, body))

        return handled


class _BodyRequest(Request):
    """What is its JSON to FastAPI is the model itself when the body is long: it is valid, and stays as it is."""

    def __init__(self, request: Request, model: TypeAdapter[Any]) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= LONG_BYTES:
            return await super().json()
        try:
            return await aside(self._read, body)
        except ParallmError as error:
            raise BodyError(error) from error

    def _read(self, body: bytes) -> Any:
        try:
            return self._model.validate_python(json.loads(body))
        except ValidationError as error:
            raise from_validation(error.errors(include_url=False)) from None
