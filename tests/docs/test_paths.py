"""What the pages and the docstrings call a file is one: after a move nobody is sent to a place that is no more."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("api", "mlx_model", "ranks", "shared", "trainer", "worker")
TOP = (*PACKAGES, "data/gsm8k", "deploy", "docs", "examples", "models/tiny", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
ROOMS = [path for path in SOURCES if path.name == "__init__.py"]

# A path from the repository's root: `api/app.py`, `docs/*.md`, `worker/engine/`; not `/v1/jobs`, not `mlx_lm/models/`.
FROM_ROOT = re.compile(rf"(?<![\w/.@-])(?:{'|'.join(TOP)})/(?:[\w./*-]*[\w/*])?")
FILE = re.compile(r"(?<![\w/.{<>*-])[a-z_]\w*\.(?:py|lua|c)\b")  # a bare file name
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
EXTERNAL = re.compile(r"https://(?!localhost|127\.)[\w-]+(\.[\w-]+)+(/[\w./%#?=+~:-]*)?")
NAMED = re.compile(r"`([\w/]+\.py):([\w.]+)`")  # `worker/publisher.py:Publisher.take`

READ_IN_TEN_MINUTES = 1_200  # lines


def exists(path: str, folder: Path = ROOT) -> bool:
    """Whether there is such a file or folder; a pattern has to match something."""
    return any(folder.glob(path)) if "*" in path else (folder / path).exists()


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def docstrings(source: str) -> Iterator[str]:
    """Those of the module, its classes and its functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def defined(path: str) -> dict[str, int]:
    """Functions, classes and methods of a file by name, each with its number of lines."""
    lines: dict[str, int] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                lines[prefix + inner.name] = (inner.end_lineno or 0) - inner.lineno + 1
                walk(inner, f"{prefix}{inner.name}.")

    walk(ast.parse((ROOT / path).read_text()), "")
    return lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_on_a_page_exist(page: Path) -> None:
    text = page.read_text()
    missing = {path for path in FROM_ROOT.findall(text) if not exists(path)}
    assert not missing, f"{page.name} names what is not there: {sorted(missing)}"


def anchors(page: Path) -> set[str]:
    """Those of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    missing = set()
    for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        other = page.parent / path if path else page
        if "://" in link:
            missing |= set() if EXTERNAL.fullmatch(link) else {link}
        elif not other.exists() or (anchor and anchor not in anchors(other)):
            missing.add(link)
    assert not missing, f"{page.name} links to what is not there: {sorted(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_files_on_a_page_are_defined_there(page: Path) -> None:
    missing = [f"{path}:{name}" for path, name in NAMED.findall(page.read_text()) if name not in defined(path)]
    assert not missing, f"{page.name} names what is not defined there: {missing}"


@pytest.mark.parametrize("package", PACKAGES)
def test_paths_in_docstrings_and_comments_exist(package: str) -> None:
    missing = []
    for path in sorted((ROOT / package).rglob("*.py")):
        source, folder = path.read_text(), path.parent
        names = {name for text in docstrings(source) for name in FILE.findall(text)}
        wrong = {name for name in names if not (exists(name, folder) or exists(f"lua/{name}", folder))}
        wrong |= {name for name in FROM_ROOT.findall(source) if not exists(name)}
        missing += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(wrong)]
    assert not missing, "docstrings or comments name what is not there: " + ", ".join(missing)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.parent.relative_to(ROOT)))
def test_a_room_says_what_its_files_are_for(room: Path) -> None:
    text = docstring(room)
    unnamed = [
        path.name for path in room.parent.glob("*.py") if not path.name.startswith("__") and path.name not in text
    ]
    assert not unnamed, f"{room.relative_to(ROOT)} says nothing of {unnamed}"
    folders = re.findall(r"(?<![\w/])([a-z_]+)/(?![\w.])", text)
    missing = [name for name in folders if not any(exists(name, near) for near in [room.parent, *room.parents])]
    assert not missing, f"{room.relative_to(ROOT)} names folders that are not there: {missing}"


def test_every_folder_of_code_says_what_it_is_for() -> None:
    silent = {path.parent for path in SOURCES if not (path.parent / "__init__.py").exists()}
    assert not silent


def rows(text: str, heading: str) -> Iterator[str]:
    """The rows of the table whose first column is called so."""
    table = text[text.index(f"| {heading}") :].split("\n\n")[0]
    yield from table.splitlines()[2:]


def test_the_reading_list_takes_ten_minutes() -> None:
    total = 0
    for row in rows((ROOT / "README.md").read_text(), "read, in this order"):
        [path], parts = re.findall(r"\]\(([\w/]+\.py)\)", row), re.findall(r"`([\w.]+)`", row)
        lines = defined(path)
        missing = [part for part in parts if part not in lines]
        assert not missing, f"README: {path} does not define {missing}"
        whole = len((ROOT / path).read_text().splitlines())
        total += sum(lines[part] for part in parts) + len(docstring(ROOT / path).splitlines()) if parts else whole
    assert 0 < total <= READ_IN_TEN_MINUTES, f"the reading list has {total} lines"


def test_the_tree_in_the_readme_is_the_one_on_disk() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = readme[readme.index("\nshared/ ") + 1 :].split("```")[0]
    folder, missing = "", []
    for line in tree.splitlines():
        head, text = re.match(r"(?:(\w+)/)?\s+(.*)", line).groups()  # type: ignore[union-attr]
        folder = head or folder
        inside = re.findall(r"([\w-]+)/(?!\w)", text) + re.findall(r"\w+\.(?:py|md)\b", text)
        missing += [f"{folder}/{name}" for name in inside if not exists(f"{folder}/{name}")]
        assert exists(folder), folder
    assert not missing, f"README's tree names what is not there: {missing}"
