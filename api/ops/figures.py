"""Figures as people read them, on pages and in the terminal."""


def size(count: float) -> str:
    """Bytes."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
