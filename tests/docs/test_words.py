"""Words that make riddles stay out of pages and of what programs say; docs/benchmarks/log.md is history."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.rings import ROOT

# "Behind a proxy" and "behind NAT" are plain; "the token behind it" is not.
AVOIDED = re.compile(
    r"\b(told|tells?|telling|kept|nobody|whoever|beside|worth|behind(?! (a|one|your|NAT|Redis)\b))\b", re.IGNORECASE
)
CODE = re.compile(r"```.*?```|^    .*?$|`[^`]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
PAGES = [page for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if page.name != "log.md"]
PACKAGES = ("api", "mlx_model", "ranks", "shared", "trainer", "worker")
DATA = {"api/demo/real.py", "trainer/tiny/data.py"}  # prompts


def messages(path: Path) -> Iterator[str]:
    """String literals of a file that have a space, without docstrings: errors, log lines, help, descriptions."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and " " in text.strip() and id(node) not in docstrings:
            yield text


def test_pages_use_plain_words() -> None:
    found = [
        f"{page.relative_to(ROOT)}: {match[0]}"
        for page in PAGES
        for match in AVOIDED.finditer(CODE.sub("", page.read_text()))
    ]
    assert not found


def test_messages_use_plain_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text.strip()[:80]!r}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in DATA
        for text in messages(path)
        if AVOIDED.search(CODE.sub("", text))
    ]
    assert not found
