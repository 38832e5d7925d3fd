"""Tests use what the product makes public; the files that still reach into private names are listed with a count.

A private name is one that begins with an underscore and is defined somewhere in the product. A reach is its use on
anything but `self`, its import, or its patching; a name that a test's file defines itself is that file's own.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("api", "shared", "trainer", "worker")

# By file: what is left. A count may fall, and its line here with it; it never rises.
REACHES = {
    "tests/bench/adapters.py": 4,
    "tests/bench/epochs.py": 1,
    "tests/bench/frames.py": 1,
    "tests/bench/speculation.py": 2,
    "tests/bench/steady_training.py": 1,
    "tests/bench/timed_worker.py": 1,
    "tests/clients/scripts/lm_eval_choices.py": 1,
    "tests/e2e/keyed/test_commands.py": 1,
    "tests/engine/adapter_bench.py": 3,
    "tests/engine/drafted.py": 1,
    "tests/engine/rank_tasks.py": 1,
    "tests/engine/test_batch_invariance.py": 1,
    "tests/engine/test_decode_step.py": 1,
    "tests/engine/test_disk_tier.py": 1,
    "tests/engine/test_draft_model.py": 1,
    "tests/engine/test_drafts_pay.py": 8,
    "tests/engine/test_guests.py": 1,
    "tests/engine/test_heads.py": 1,
    "tests/engine/test_networks.py": 2,
    "tests/engine/test_schedules.py": 1,
    "tests/engine/test_service_learner.py": 1,
    "tests/engine/test_speculation.py": 4,
    "tests/engine/test_stops.py": 2,
    "tests/engine/test_tails.py": 2,
    "tests/engine/test_trainer_values.py": 4,
    "tests/engine/test_unread_checks.py": 9,
    "tests/engine/test_vision.py": 1,
    "tests/engine/test_warm_up.py": 4,
    "tests/redis/shared_trainers.py": 1,
    "tests/redis/test_adapter_cache.py": 1,
    "tests/redis/test_api_client_chats.py": 1,
    "tests/redis/test_bad_messages.py": 1,
    "tests/redis/test_cancellation.py": 1,
    "tests/redis/test_group.py": 4,
    "tests/redis/test_jobs_store.py": 2,
    "tests/redis/test_kv_fetches.py": 1,
    "tests/redis/test_metric_store.py": 1,
    "tests/redis/test_reward_shares.py": 4,
    "tests/redis/test_ring_memory.py": 2,
    "tests/redis/test_rounds.py": 2,
    "tests/unit/test_bodies.py": 1,
    "tests/unit/test_draft_memory.py": 6,
    "tests/unit/test_draft_texts.py": 3,
    "tests/unit/test_fair_pool.py": 1,
    "tests/unit/test_grammar_checker.py": 2,
    "tests/unit/test_images.py": 1,
    "tests/unit/test_kv_folder.py": 1,
    "tests/unit/test_response_history.py": 1,
    "tests/unit/test_scoring_shares.py": 1,
}


PRIVATE = re.compile(r"(?<!\w)_[a-zA-Z]\w*")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_in(tree: ast.Module) -> Iterator[str]:
    """Private names of functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name


def private_names(tree: ast.Module) -> set[str]:
    return {name for name in defined_in(tree) if is_private(name)}


def reaches(tree: ast.Module) -> Iterator[str]:
    """Private names that the code of a module uses on other things than `self`."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] in PRODUCT:
                yield from (each.name for each in names)
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr" | "object"), args=args):
                strings = [each.value for each in args[:2] if isinstance(each, ast.Constant)]
                yield from (str(each).rpartition(".")[2] for each in strings)


def test_no_test_reaches_further_into_the_product_s_private_names() -> None:
    tests = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    said = {path: set(PRIVATE.findall(text)) for path, text in tests.items()}
    wanted, known = set[str]().union(*said.values()), set[str]()
    for path in (each for room in PRODUCT for each in (ROOT / room).rglob("*.py")):
        text = path.read_text()
        if not known >= wanted & set(PRIVATE.findall(text)):
            known |= private_names(ast.parse(text))
    found: Counter[str] = Counter()
    for path, text in tests.items():
        if said[path] & known:  # else it need not be parsed
            tree = ast.parse(text)
            foreign = known - private_names(tree)
            count = sum(name in foreign for name in reaches(tree))
            found.update({path.relative_to(ROOT).as_posix(): count} if count else {})
    more = {path: (count, REACHES.get(path, 0)) for path, count in found.items() if count > REACHES.get(path, 0)}
    assert not more, f"reaches into private names, and how many there may be: {more}; a test uses what is public"
