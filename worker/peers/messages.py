"""What two workers say about KV: msgpack, on authentic connections (shared/wire.py)."""

import msgspec


class KvRequest(msgspec.Struct, frozen=True):
    """Asks for KV of the beginning of these ids."""

    identity: str  # of what it computes with (worker/engine/prefixes/parcels.py)
    version: str  # of the adapter; "": none
    ids: list[int]
    known: int  # ids that a hit has there
    blocks: int  # that are there
    at_most: int  # ids that are of use
    most_bytes: int


class Offer(msgspec.Struct, frozen=True):
    """Answers a request with what there is."""

    length: int = 0  # ids, those that are known included; 0: nothing more than is known
    sizes: list[int] = []  # of the parcels that follow, about
    refusal: str = ""  # why it gives nothing


class SendParcels(msgspec.Struct, frozen=True):
    """Accepts an offer: the parcels follow."""
