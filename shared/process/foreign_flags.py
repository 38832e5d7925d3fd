"""Flags that other MLX servers have and ours does not: each is refused with the reason and what to use instead.

Two kinds are taken without effect, so that a command line from elsewhere starts: those that ask for what is so anyway
(`--distributed-mode off`), in silence, and those of WITHOUT_EFFECT, with a line on stderr. A flag that a process does
have is never looked up here.
"""

import sys
from collections.abc import Collection

from shared.errors import SetupError

_TENSOR_PARALLEL = (
    "a model is not split over machines or processes: each worker holds all of it; "
    "add workers with --workers N, or mlx_parallm_worker on another machine"
)
_TENSOR_PARALLEL_FLAGS = (
    "distributed-mode", "distributed-sharding", "distributed-strict", "no-distributed-strict", "distributed-hostfile",
    "distributed-ibv-devices", "distributed-jaccl-coordinator", "num-local-ranks",
)  # fmt: skip

REFUSED = {
    "adapter-path": "adapters are versions that the ring keeps: start, then mlx_parallm adapters upload DIR",
    "max-generation-tokens": "a request's 'max_tokens' is bounded by the model's context; --max-context shortens it",
    "completion-batch-size": "there is one batch, of --max-batch-size rows",
    "num-blocks": "KV memory is given in bytes: --kv-memory-gb, and --prefix-cache-gb for earlier prompts",
    "sequence-cache-size": "earlier prompts are kept by memory, not by number: --prefix-cache-gb",
    "draft-model-quantize": "--draft-model-path takes a model that is quantised already: mlx_lm.convert -q makes one",
    **dict.fromkeys(_TENSOR_PARALLEL_FLAGS, _TENSOR_PARALLEL),
}
ALREADY_SO = {("distributed-mode", "off")}
WITHOUT_EFFECT = {
    "flush-interval-ms": "requests are not gathered: a new one joins the running batch at its next step",
    "share-model": "any ring can be joined, with the line that is printed when the server is ready; weights are not "
    "sent: the other machine needs the model, too",
}


def native(args: list[str], known: Collection[str]) -> list[str]:
    """A command line without the foreign flags that may be left out; `known` are the process's own, in kebab case.

    SetupError for a foreign flag that asks for something we do not have.
    """
    kept: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.removeprefix("--").partition("=")
        foreign = arg.startswith("--") and name not in known and (name in REFUSED or name in WITHOUT_EFFECT)
        if not foreign:
            kept.append(arg)
            continue
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        if name in WITHOUT_EFFECT:
            print(f"--{name} has no effect: {WITHOUT_EFFECT[name]}", file=sys.stderr)
        elif (name, value) not in ALREADY_SO:
            raise SetupError(f"--{name}: {REFUSED[name]}")
    return kept
