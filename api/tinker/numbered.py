"""Requests that a learner carries out in the order of their numbers.

Invariant. A client that is refused has used up the number of its request, and what it asks next has the next one. So a
refusal is placed under its number, where its learner's service answers it with the error; otherwise everything after
it would wait for ever. What the client sends again by itself (a full queue, a server's fault) is not placed.
"""

import contextlib
from typing import Literal

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from api.callers.fair_pool import aside
from api.http.bodies import BodyRoute
from api.http.errors import BodyError, translate
from api.http.limits import PASSES, is_protobuf
from api.ring.ring import ring_of
from api.tinker.names import spec_named
from api.tinker.passes import Form, number, number_decoder
from shared.errors import ConflictError, InvalidRequestError, NotFoundError, ParallmError
from shared.learners import RefusedRequest

SENT_AGAIN = (408, 429, 499)  # and what is a server's fault


class NumberedRoute(BodyRoute):
    """A route whose body may have the number of a learner's request, `model_id` and `seq_id`."""

    async def refused(self, request: Request, error: Exception) -> None:
        """Place the refusal; NotFoundError and others when that learner is not the asker's, or takes no such number."""
        if not isinstance(error, ParallmError | RequestValidationError | HTTPException):
            return
        refusal = translate(request, error)
        if not 400 <= refusal.status < 500 or refusal.status in SENT_AGAIN:
            return
        with contextlib.suppress(InvalidRequestError, NotFoundError, ConflictError, BodyError):
            body = error.body if isinstance(error, BodyError) and error.body else await request.body()
            path = request.scope["path"]
            form = Form(is_protobuf(request.headers), path == PASSES)
            named = number_decoder.decode(await aside(number, body, msgspec.msgpack.encode(form)))
            if 1 <= named.seq_id < 2**31:
                ring = await ring_of(request)
                spec = await spec_named(ring, named.model_id)
                of: Literal["pass", "step", "other"] = "pass" if named.backward else "other"
                of = "step" if path.endswith("/optim_step") else of
                await ring.learners.place(spec, named.seq_id + 1, RefusedRequest(refusal.message, of))
