"""What a run is made of. Each part is a seam: the ring's in production, an in-process one in tests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainer.board import Board, NoBoard
from trainer.conversation import Conversation
from trainer.environments import Environment
from trainer.host import ComputeHost
from trainer.live import LiveQueue
from trainer.mailbox import Mailbox, NoMailbox
from trainer.publish import AdapterSink
from trainer.rollouts import RolloutSource


@dataclass(frozen=True)
class Parts:
    """The parts of one run."""

    host: ComputeHost
    load_model: Callable[[], Any]  # called in the host's thread; an mlx-lm model
    base_sha256: str
    conversation: Conversation
    source: RolloutSource
    sink: AdapterSink
    environment: Environment
    held_out: Environment | None = None
    board: Board = field(default_factory=NoBoard)
    live: LiveQueue | None = None  # needed for the sources `live` and `both`
    mailbox: Mailbox = field(default_factory=NoMailbox)
    ring: str = ""  # the name of the ring's data; "": there is none
