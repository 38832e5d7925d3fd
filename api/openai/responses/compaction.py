"""POST /v1/responses/compact: a conversation becomes what the user said, and the model's summary of the rest.

The summary is generated as any answer is. It comes in a `compaction` item, which a client puts into later inputs in
place of the turns before it; nothing is stored.
"""

import secrets
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from api.callers.fair_pool import aside
from api.generation.running import gather_all
from api.generation.target import target_of
from api.http.bodies import BodyRoute
from api.http.errors import error_responses
from api.openai.replies import written
from api.openai.responses.body import ResponseRequest
from api.openai.responses.history import history_of
from api.openai.responses.items import sealed
from api.openai.responses.parts import TextPart
from api.openai.responses.planning import plan_response
from api.openai.responses.references import resolved
from api.openai.responses.storage import shown_items
from api.openai.responses.turns import InputMessage
from api.openai.responses.writer import ResponseWriter
from api.ring.ring import TheRing
from shared.errors import InvalidRequestError

router = APIRouter(tags=["openai"], route_class=BodyRoute)

_TASK = """\
Write a summary of this conversation for a colleague who goes on with it and sees nothing of it but your summary and \
the user's own messages. Say what the user wants, what was decided and why, what was done and what came of it (names, \
paths, figures, errors as they are), and what is left to do. Write the summary alone."""
# Of the request, what would make the summary something else: it is text.
_PLAIN: dict[str, Any] = {"tools": None, "tool_choice": None, "text": None, "include": None, "structured_outputs": None}


@router.post(
    "/v1/responses/compact",
    summary="Shorten a conversation",
    responses=error_responses(404, 409, ok="The user's messages, and a `compaction` item with a summary of the rest"),
)
async def compact(body: ResponseRequest, request: Request, ring: TheRing) -> Response:
    """Returns the items that replace the turns so far when the conversation continues."""
    for name in ("stream", "background", "conversation"):
        if getattr(body, name):
            raise InvalidRequestError(f"'{name}' does not go with a compaction", param=name)
    history = await history_of(ring, body)
    said = [*history.items, *await resolved(ring, body.input)]
    task = InputMessage(role="user", content=[TextPart(type="input_text", text=_TASK)])
    asked = body.model_copy(update={**_PLAIN, "input": [*said, task], "store": False})
    target = await target_of(ring, asked, request, split=True)
    _, plan = await plan_response(target.ring, asked, target, history)
    writer = ResponseWriter(asked, plan, target.served.codec)
    (events,) = await gather_all(target.ring, plan.sequences)
    answer = msgspec.json.decode(await written(events, lambda: writer.whole(events)))
    texts = [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    if not (summary := "".join(texts).strip()):
        most = plan.sequences.template.sampling.max_tokens
        reason = f"the model wrote no summary within {most} tokens: give it more"
        raise InvalidRequestError(reason, param="max_output_tokens")
    by_user = [item for item in said if isinstance(item, InputMessage) and item.role == "user"]
    shown = [msgspec.Raw(raw) for _, raw in await aside(shown_items, by_user, writer.name)]
    made = {"id": f"cmp_{secrets.token_hex(16)}", "type": "compaction", "encrypted_content": sealed(summary)}
    whole = {"id": writer.id, "object": "response.compaction", "created_at": plan.created, "output": [*shown, made]}
    return Response(msgspec.json.encode({**whole, "usage": answer["usage"]}), media_type="application/json")
