"""References to items of stored responses (`item_reference`), which clients send in place of the items.

An item's id has the name of its response in it, `TYPE_NAME_NUMBER` of `resp_NAME`, so nothing else has to be stored for
it to be found.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from api.callers.fair_pool import aside
from api.http.bodies import LONG_BYTES
from api.openai.responses.history import MAX_TURNS, check_size, keeper, read_items
from api.openai.responses.turns import Item, ItemReference
from api.ring.ring import Ring
from shared.errors import InvalidRequestError, NotFoundError


async def resolved(ring: Ring, items: list[Item]) -> list[Item]:
    """The items, with those that references name in their place; NotFoundError for one that is not stored."""
    wanted = {item.id: _response_of(item.id or "") for item in items if isinstance(item, ItemReference)}
    if not wanted:
        return items
    responses = sorted(set(wanted.values()))
    if len(responses) > MAX_TURNS:
        raise InvalidRequestError(f"references to items of more than {MAX_TURNS} responses", param="input")
    raws: list[bytes] = []
    for response in responses:
        (turn, *_), _ = await ring.responses.chain(keeper(), response, 1, ring.settings.max_request_bytes)
        raws += [turn.input, turn.output]
        check_size(ring, raws, "input")
    named = list(filter(None, wanted))
    long = sum(map(len, raws)) > LONG_BYTES
    found = await aside(_found, raws, named) if long else _found(raws, named)
    for at, item in enumerate(items):
        if isinstance(item, ItemReference) and item.id not in found:
            raise NotFoundError(
                f"no stored item {(item.id or '')[:200]!r}: its response was not stored ('store'), was deleted, or its "
                "time to live is over",
                param=f"input[{at}]",
            )
    return [found[item.id or ""] if isinstance(item, ItemReference) else item for item in items]


def _response_of(item: str) -> str:
    return f"resp_{item.partition('_')[2].rpartition('_')[0]}"


def _found(raws: Sequence[bytes], wanted: Sequence[str]) -> dict[str, Item]:
    stored: dict[str, Any] = {item["id"]: item for raw in raws for item in msgspec.json.decode(raw)}
    names = [name for name in wanted if name in stored]
    return dict(zip(names, read_items([stored[name] for name in names]), strict=True))
