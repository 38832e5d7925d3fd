"""Numbers of bytes, for people."""


def size(count: float) -> str:
    """A number of bytes in the unit that suits it."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
