"""Where a model comes from: a folder or file of this machine, or the hub."""

from pathlib import Path

from shared.catalogue import CatalogueEntry
from shared.process.model_aliases import hub_folder, is_hub_name, short_name


def entry_of(source: str) -> CatalogueEntry:
    """The entry of a model that the command line names."""
    return CatalogueEntry(short_name(source), source)


def is_here(source: str) -> bool:
    """True for files on this machine."""
    if Path(source).expanduser().exists() or not is_hub_name(source):
        return Path(source).expanduser().exists()
    fetched = hub_folder(source)
    return (fetched / "refs" / "main").exists() and not any(fetched.glob("blobs/*.incomplete"))


def last_change(source: str) -> int:
    """When a model's folder or a file in it was last changed, ns of Unix time; 0: it is not here."""
    path = Path(source).expanduser()
    try:
        return max(each.stat().st_mtime_ns for each in (path, *path.glob("*")))
    except OSError:
        return 0


def may_be_fetched(source: str) -> bool:
    """True for a name of the hub, whether its files are here by now or not."""
    return is_hub_name(source) and not Path(source).expanduser().exists()
