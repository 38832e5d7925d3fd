"""How the code is laid out: folders of one subject, none too full, and every name taken from where it is defined."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("api", "mlx_model", "ranks", "shared", "trainer", "worker")
MOST_FILES = 24  # of code in one folder, `__init__.py` not counted
MOST_LINES = 600  # of a file
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}  # say nothing of what is inside
FEWEST_WORDS = 5  # of a sentence that says something, besides paths
NO_SUBJECT = re.compile(r"(See|Of|Its|Whether|What)\b")  # how a docstring begins that is no sentence with a subject
FEWEST_LINES = 30  # of a file; a shorter one belongs into another
# Short files that are nouns of their own, used by several rooms.
NOUNS = {
    "api/cli/convert.py",  # a command: each is a file
    "shared/text/languages/language.py",  # the language of a model, which needs a tokenizer; the others need none
    "api/ops/sizes.py",  # what the dashboard and commands show, which load nothing else of this room
    "api/http/ollama_errors.py",  # how a protocol says errors: each is a file
    "shared/machine/commands.py",  # how programs of macOS are run: memory, power, heat and addresses come by them
    "shared/ranks.py",  # the status of a rank, which workers and trainers report and an api shows
    "shared/seeds.py",  # seeds that follow from others: a promise to clients, so in one place
    "shared/webhooks.py",  # a receiver: jobs, batches and responses carry it
    "worker/peers/messages.py",  # the protocol between two workers
}
# Names of classes that stand twice: bodies, and their writers, that two protocols call alike.
BODIES = {
    "AllowedTools": {"api/openai/tools.py", "api/openai/responses/body.py"},
    "Reasoning": {"api/openai/responses/body.py", "shared/text/languages/families.py"},
    "GenerateRequest": {"api/rl/generate.py", "api/ollama/body.py"},
    "ChatWriter": {"api/anthropic/turns.py", "api/ollama/turns.py"},
    "LoadBody": {"api/adapters/bodies.py", "api/tinker/bodies.py"},
}
_PATH = re.compile(r"/|\.(py|lua|c)\b")


def code(suffixes: tuple[str, ...] = (".py", ".lua", ".c")) -> list[Path]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*"))
    return sorted(path for path in paths if path.suffix in suffixes and "__pycache__" not in path.parts)


ROOMS = sorted({path.parent for path in code((".py",))})
MODULES = code((".py",))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_file(name: str) -> Path | None:
    """The file of a module of ours; None: there is none of that name."""
    at = ROOT / name.replace(".", "/")
    return next((path for path in (at.with_suffix(".py"), at / "__init__.py") if path.is_file()), None)


def own_imports(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """What is taken by name from modules of ours: module, name, line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            for name in node.names:
                yield node.module, name.name, node.lineno


@cache
def defined(path: Path) -> frozenset[str]:
    """The names that a module itself defines at its top, conditional ones included."""
    names: set[str] = set()
    bodies = [tree_of(path).body]
    while bodies:
        for node in bodies.pop():
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    names.add(node.name)
                case ast.Assign():
                    targets = (each for target in node.targets for each in ast.walk(target))
                    names.update(each.id for each in targets if isinstance(each, ast.Name))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
                case ast.If():
                    bodies += [node.body, node.orelse]
                case ast.Try():
                    bodies += [node.body, node.orelse, *(handler.body for handler in node.handlers)]
                case ast.With():
                    bodies.append(node.body)
    return frozenset(names)


def has_sentence(text: str) -> bool:
    """Whether there is a whole sentence that says more than where files are."""
    *sentences, _ = re.split(r"\.(?=\s|$)", text)
    said = ([word for word in sentence.split() if not _PATH.search(word)] for sentence in sentences)
    return any(len(words) >= FEWEST_WORDS for words in said)


def test_no_folder_is_too_full() -> None:
    folders: dict[Path, int] = {}
    for path in code():
        folders[path.parent] = folders.get(path.parent, 0) + (path.name != "__init__.py")
    full = {shown(folder): count for folder, count in folders.items() if count > MOST_FILES}
    assert not full, f"more than {MOST_FILES} files of code in one folder: which of them are a subject of their own?"


def test_every_room_says_what_it_is_for() -> None:
    silent = []
    for room in ROOMS:
        door = room / "__init__.py"
        if not door.is_file() or not has_sentence(ast.get_docstring(tree_of(door)) or ""):
            silent.append(shown(door))
    assert not silent, "a room's docstring says in a sentence what the room is for"


def test_a_path_is_no_sentence() -> None:
    assert not has_sentence("")
    assert not has_sentence("api/openai.")
    assert not has_sentence("Files of api/openai/responses, api/openai and api/http.")
    assert not has_sentence("Sequences that wait for a worker")
    assert has_sentence("Sequences that wait for a worker, and what becomes of them.\n\nRead queue.py first.")


def test_no_room_is_named_after_nothing() -> None:
    named = [shown(path) for path in code() if EMPTY_NAMES & {*path.relative_to(ROOT).with_suffix("").parts}]
    assert not named


def test_no_module_is_too_long() -> None:
    long = {shown(path): lines for path in code() if (lines := len(path.read_text().splitlines())) > MOST_LINES}
    assert not long, f"over {MOST_LINES} lines"


def test_no_file_is_a_fragment() -> None:
    short = {shown(path) for path in MODULES if len(path.read_text().splitlines()) < FEWEST_LINES}
    short = {name for name in short if not name.endswith("/__init__.py")}
    assert short == NOUNS, f"below {FEWEST_LINES} lines: merge it into the file where it belongs"


def test_docstrings_are_sentences_that_say_something() -> None:
    poor = []
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text is not None and (len(text.split()) < FEWEST_WORDS or NO_SUBJECT.match(text)):
                    poor.append(f"{shown(path)}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}")
    assert not poor, "a docstring is a sentence with a subject; where there is nothing to add there is none"


def test_no_public_class_name_stands_twice() -> None:
    places: dict[str, set[str]] = {}
    for path in MODULES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(shown(path))
    assert {name: files for name, files in places.items() if len(files) > 1} == BODIES


def test_imports_hide_no_circle() -> None:
    hidden = []
    for path in MODULES:
        if "TYPE_CHECKING" not in path.read_text():
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                modules = {name.name for each in ast.walk(node) if isinstance(each, ast.Import) for name in each.names}
                modules |= {module for module, _, _ in own_imports(node)}
                hidden += [f"{shown(path)}:{node.lineno} {name}" for name in modules if name.split(".")[0] in PACKAGES]
    assert not hidden, "a type of ours that cannot be imported as others can stands in the wrong room"


def test_names_are_taken_from_where_they_are_defined() -> None:
    elsewhere = []
    for path in MODULES:
        for module, name, line in own_imports(tree_of(path)):
            source = module_file(module)
            if module_file(f"{module}.{name}") is None and (source is None or name not in defined(source)):
                elsewhere.append(f"{shown(path)}:{line} from {module} import {name}")
    assert not elsewhere, "the module does not define the name but imports it itself"
