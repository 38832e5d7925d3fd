"""Write the generated pages of docs/reference/ from the code. `python docs/generate.py [--check]`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import typer
from pydantic.fields import FieldInfo
from typer.cli import get_docs_for_click

from api.app import create_app
from api.cli.main import app as cli
from shared import errors
from shared.process.api_settings import ApiSettings
from shared.process.process_settings import JoinSettings, ProcessSettings, RunnerSettings
from shared.process.serve_settings import ServeSettings
from shared.process.worker_settings import WorkerSettings
from shared.redis import keys
from shared.telemetry.metrics import CATALOGUE
from trainer.service.settings import LearnersSettings
from trainer.settings import TrainSettings

FOLDER = Path(__file__).parent / "reference"
SETTINGS: dict[str, type[ProcessSettings]] = {  # what a kind inherits from another one stands in the other's table
    "Every process": ProcessSettings,
    "Joining a ring: all of `mlx_parallm_*`": JoinSettings,
    "`mlx_parallm_worker`: one worker": WorkerSettings,
    "`python -m api`: one api process": ApiSettings,
    "`python -m worker.jobs`: one job runner": RunnerSettings,
    "`mlx_parallm_serve`: all processes on one machine; takes the settings of worker, api and job runner, too": (
        ServeSettings
    ),
    "`mlx_parallm_train`: the trainer": TrainSettings,
    "`mlx_parallm_learners`: the training service": LearnersSettings,
}


def settings_page() -> list[str]:
    lines = [
        "# Settings",
        "",
        "Flags win over the environment (`PARALLM_*`), the environment over YAML (`--config FILE`), YAML over the",
        "defaults. An unknown flag or YAML key is an error. `--dry-run` prints what was resolved.",
        "",
    ]
    for title, kind in SETTINGS.items():
        lines += table(title, kind)
    return lines


def table(title: str, kind: type[ProcessSettings]) -> list[str]:
    lines = [f"## {title}", "", "| flag | environment | default | meaning |", "|---|---|---|---|"]
    inherited = {name for base in kind.__mro__[1:] if issubclass(base, ProcessSettings) for name in base.model_fields}
    for name, field in kind.model_fields.items():
        if name in inherited and name not in kind.__annotations__:
            continue
        variable = "PARALLM_REDIS_URL" if name == "redis" else f"PARALLM_{name.upper()}"
        default = shown(field.get_default(call_default_factory=True))
        lines.append(f"| `--{name.replace('_', '-')}` | `{variable}` | {default} | {meaning(field)} |")
    return [*lines, ""]


def meaning(field: FieldInfo) -> str:
    """The description, and what may be chosen."""
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    named = ", ".join(f"`{choice}`" for choice in choices if choice)
    if not field.description or len(choices) < 2:
        return field.description or named
    return f"{field.description} ({named})"


def shown(default: Any) -> str:
    text = str(default)
    return f"`{text}`" if text not in ("", "None") else ""


def keys_page() -> list[str]:
    lines = ["# Redis keys", "", "| key | type | owner | time to live | meaning |", "|---|---|---|---|---|"]
    lines += [f"| `{k.pattern}` | {k.type} | {k.owner} | {k.ttl} | {k.meaning} |" for k in keys.DOCUMENTED]
    return [*lines, ""]


def metrics_page() -> list[str]:
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` of any api process has the figures of the whole ring, in Prometheus' text format. Names with",
        "`vllm:` are vLLM's. Counters and histograms are sums over all processes, dead ones included.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{m.name}` | {m.kind} | {', '.join(m.labels)} | {m.meaning} |" for m in CATALOGUE.values()]
    return [*lines, ""]


def errors_page() -> list[str]:
    lines = [
        "# Errors",
        "",
        'Every error is `{"error": {"message", "type", "param", "code"}}`, as OpenAI\'s.',
        "",
        "| status | type | code | meaning |",
        "|---|---|---|---|",
    ]
    for kind in sorted(tree(errors.ParallmError), key=lambda kind: (kind.status, kind.code or "")):
        meaning = (kind.__doc__ or "").strip().splitlines()[0]
        lines.append(f"| {kind.status} | `{kind.type}` | {f'`{kind.code}`' if kind.code else ''} | {meaning} |")
    return [*lines, ""]


def tree(root: type[errors.ParallmError]) -> list[type[errors.ParallmError]]:
    found = [root]
    for kind in root.__subclasses__():
        found += tree(kind)
    return [kind for kind in dict.fromkeys(found) if kind.__module__ == errors.__name__]


def http_page() -> list[str]:
    """Every route that OpenAPI describes, by tag, with the fields of its JSON body."""
    document = create_app(ApiSettings()).openapi()
    lines = [
        "# HTTP",
        "",
        "A running server answers the same with all types at `/openapi.json`, and to be tried at `/docs`. Pages on the",
        "protocols say what clients can rely on: [OpenAI](openai.md), [Anthropic](anthropic.md), [Tinker](tinker.md),",
        "[jobs](jobs.md), [batches](batches.md), [training](training-api.md).",
        "",
    ]
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            [tag, *_] = route.get("tags") or ["ring"]
            by_tag.setdefault(tag, []).extend(route_section(f"{method.upper()} {path}", route, document))
    for tag, sections in by_tag.items():
        lines += [f"## {tag}", "", *sections]
    return lines


def route_section(title: str, route: dict[str, Any], document: dict[str, Any]) -> list[str]:
    summary, description = route.get("summary", ""), (route.get("description") or "").replace("\n", " ")
    lines = [f"### `{title}`", "", f"{summary}. {description}".strip(), ""]
    schema = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    fields = resolved(schema, document).get("properties", {})
    if fields:
        lines += ["| field | type | meaning |", "|---|---|---|"]
        for name, field in fields.items():
            meaning = field.get("description", "").replace("\n", " ").replace("|", "\\|")
            lines.append(f"| `{name}` | {type_of(field, document)} | {meaning} |")
        lines.append("")
    return lines


def resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in schema:
        return schema
    found: dict[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def type_of(field: dict[str, Any], document: dict[str, Any]) -> str:
    """A JSON schema's type in a word or two."""
    field = resolved(field, document)
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if variants := field.get("anyOf") or field.get("oneOf") or field.get("allOf"):
        return " or ".join(dict.fromkeys(type_of(each, document) for each in variants if each.get("type") != "null"))
    if field.get("type") == "array":
        return f"array of {type_of(field.get('items', {}), document)}"
    return str(field.get("type", "any"))


def cli_page() -> list[str]:
    command = typer.main.get_command(cli)
    context = click.Context(command, info_name="mlx_parallm")
    text = get_docs_for_click(obj=command, ctx=context, name="mlx_parallm", title="The client's commands in full")
    return text.splitlines()


PAGES: dict[str, Callable[[], list[str]]] = {
    "settings.md": settings_page,
    "keys.md": keys_page,
    "metrics.md": metrics_page,
    "errors.md": errors_page,
    "http.md": http_page,
    "cli.md": cli_page,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 and name the pages that are out of date")
    pages = {name: text(page()) for name, page in PAGES.items()}
    if parser.parse_args().check:
        stale = [
            name for name, page in pages.items() if not (FOLDER / name).exists() or (FOLDER / name).read_text() != page
        ]
        print("\n".join(stale))
        return 1 if stale else 0
    for name, page in pages.items():
        (FOLDER / name).write_text(page)
    return 0


def text(lines: list[str]) -> str:
    [title, *rest] = lines
    return "\n".join([title, "", "This page is generated by `make docs`; edits are lost.", *rest]).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
