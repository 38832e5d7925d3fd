"""Flags that other MLX servers have and ours does not: each is refused with the reason and what to use instead.

Those of WITHOUT_EFFECT are taken, with a line on stderr, so that a command line from elsewhere starts. A flag that a
process does have is never looked up here.
"""

import sys
from collections.abc import Collection

from shared.errors import SetupError

REFUSED = {
    "adapter-path": "adapters are versions that the ring keeps: start, then mlx_parallm adapters upload DIR",
    "max-generation-tokens": "a request's 'max_tokens' is bounded by the model's context; --max-context shortens it",
    "completion-batch-size": "there is one batch, of --max-batch-size rows",
    "num-blocks": "KV memory is given in bytes: --kv-memory-gb, and --prefix-cache-gb for earlier prompts",
    "sequence-cache-size": "earlier prompts are stored by memory, not by number: --prefix-cache-gb",
    "draft-model-quantize": "--draft-model-path takes a model that is quantised already: mlx_lm.convert -q makes one",
}
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
        name, equals, _ = arg.removeprefix("--").partition("=")
        foreign = arg.startswith("--") and name not in known and (name in REFUSED or name in WITHOUT_EFFECT)
        if not foreign:
            kept.append(arg)
            continue
        if not equals and rest and not rest[0].startswith("--"):
            rest.pop(0)
        if name in WITHOUT_EFFECT:
            print(f"--{name} has no effect: {WITHOUT_EFFECT[name]}", file=sys.stderr)
        else:
            raise SetupError(f"--{name}: {REFUSED[name]}")
    return kept
