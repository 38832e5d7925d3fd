"""The state of a recurrent policy that is kept for its client, under an id that the client chooses, between steps."""

from api.generation.running import owner
from api.ring.ring import Ring
from shared.adapters import AdapterManifest
from shared.errors import ConflictError, InvalidRequestError, UnknownSessionError
from shared.networks.spec import NetworkSpec
from shared.networks.tensors import Tensors, pack, unpack
from shared.redis.kept.session_store import Session, begun, sessions_of


async def session_of(
    ring: Ring, id: str, manifest: AdapterManifest, *, reset: bool, step: int | None
) -> tuple[Session, Tensors]:
    """The session, and the state that its next step begins with, none at the first.

    UnknownSessionError without one; ConflictError when it is not at `step`, or is one of another network.
    """
    network = manifest.network
    if network is None or not network.state:
        raise InvalidRequestError(f"{manifest.id} has no state to keep", param="session_id")
    if reset:
        return begun(manifest.name), {}
    session = await ring.sessions.find(sessions_of(owner()), id)
    if session is None:
        raise UnknownSessionError(
            f"there is no session '{id}': begin it with 'reset'; one that is not used for "
            f"{ring.settings.session_ttl_s} s is deleted (--session-ttl-s)",
            param="session_id",
        )
    if step is not None and step != session.step:
        raise ConflictError(f"session '{id}' has made {session.step} steps, not {step}", param="session_step")
    state = unpack(session.state)
    wanted = {name: each.shape for name, each in network.state.items()}
    if session.policy != manifest.name or {name: each.shape[1:] for name, each in state.items()} != wanted:
        raise ConflictError(
            f"session '{id}' has the state of '{session.policy}', which does not fit {manifest.id}: begin anew with "
            "'reset'",
            param="session_id",
        )
    return session, state


async def move_on(ring: Ring, id: str, session: Session, network: NetworkSpec, outputs: Tensors) -> int:
    """Store the state after a step; how many steps the session has made. ConflictError when it has moved meanwhile."""
    state = pack({name: outputs[name] for name in network.state})
    if not await ring.sessions.move(sessions_of(owner()), id, session, state):
        raise ConflictError(
            f"another request has moved session '{id}' on meanwhile, or it is gone; its steps come one after another",
            param="session_id",
        )
    return session.step + 1
