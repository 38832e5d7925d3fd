"""Which version of ParaLLM runs."""

import importlib.metadata


def version() -> str:
    """That of the installed package; "unknown" where the code runs without one."""
    try:
        return importlib.metadata.version("mlx-parallm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
