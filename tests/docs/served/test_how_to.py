"""The how-to pages and the quickstart: the commands that each begins with run as they stand, and in that order."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.docs.shell import READY, START, STAYS, Shell, blocks
from tests.e2e.rings import ROOT

PAGES = sorted(ROOT.glob("docs/how-to/*.md"))
LONGEST = 200  # lines
FEWEST_PARTS = {"## Limits", "## Limits and what was run", "## What is promised", "## When it does not learn"}


def begins(page: Path) -> list[str]:
    """The commands before the first heading of a page: what a reader copies first."""
    return blocks(page.read_text().split("\n## ")[0])


def serves(page: Path) -> bool:
    """Whether it starts a server of its own, not the quickstart's."""
    return any("mlx_parallm_serve" in block and block != START for block in begins(page))


def follow(shell: Shell, page: Path) -> None:
    with ExitStack() as running:
        for block in begins(page):
            if block == START:  # which runs already
                continue
            if stays := STAYS.match(block):
                program = shell.start(block)
                running.callback(program.stop)
                program.wait_for_line(READY[stays[1]])
            else:
                assert shell.run(block), f"{page.name}: a reader sees nothing of {block!r}"


@pytest.mark.parametrize("page", [page for page in PAGES if not serves(page)], ids=lambda page: page.stem)
def test_a_page_s_commands_run_on_the_quickstart_s_server(page: Path, served: Shell) -> None:
    follow(served, page)


@pytest.mark.parametrize("page", [page for page in PAGES if serves(page)], ids=lambda page: page.stem)
def test_a_page_that_starts_a_server_runs(page: Path, tmp_path: Path) -> None:
    follow(Shell(tmp_path), page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_says_its_limits(page: Path) -> None:
    text = page.read_text()
    assert begins(page), "it begins with commands"
    assert len(text.splitlines()) <= LONGEST
    assert any(part in text for part in FEWEST_PARTS)
