"""`make demo`: the whole ring on this machine with the tiny model, seen through its own clients."""
