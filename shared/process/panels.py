"""The `--help` of a process with many settings: in panels, the common ones first, and a usage of one line."""

from collections.abc import Collection, Mapping
from typing import Any

Panels = Mapping[str, Collection[str]]  # title -> settings


def in_panels(panels: Panels) -> dict[str, Any]:
    """What makes pydantic-settings' command line list each flag in its panel; nothing where there are none."""
    if not panels:
        return {}
    title_of = {name: title for title, names in panels.items() for name in names}
    groups: dict[str, Any] = {}

    def add(parser: Any, *flags: str, **given: Any) -> Any:
        if not groups:
            parser.usage = "%(prog)s [--config FILE] [--FLAG VALUE ...]; --help lists the flags"
            groups.update({title: parser.add_argument_group(title) for title in panels})
        flags = tuple(flag for flag in flags if flag.islower())  # names of variables are no flags for people
        where = groups.get(title_of.get(given.get("dest", ""), ""), parser)  # the parser itself has -h
        return where.add_argument(*flags, **given)

    return {"add_argument_method": add}
