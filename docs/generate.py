"""Write docs/reference.md from the code: settings, Redis keys, errors. `python docs/generate.py [--check]`."""

import argparse
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from shared import errors
from shared.process.api_settings import ApiSettings
from shared.process.process_settings import JoinSettings, ProcessSettings, RunnerSettings
from shared.process.serve_settings import ServeSettings
from shared.process.worker_settings import WorkerSettings
from shared.redis import keys
from shared.telemetry.metrics import CATALOGUE
from trainer.service.settings import LearnersSettings
from trainer.settings import TrainSettings

TARGET = Path(__file__).parent / "reference.md"
SETTINGS: dict[str, type[ProcessSettings]] = {  # what a kind inherits from another one stands in the other's table
    "Every process": ProcessSettings,
    "Whoever joins a ring: all of `mlx_parallm_*`": JoinSettings,
    "`mlx_parallm_worker`: one worker": WorkerSettings,
    "`python -m api`: one api process": ApiSettings,
    "`python -m worker.jobs`: one job runner": RunnerSettings,
    "`mlx_parallm_serve`: all processes on one machine; takes the settings of worker, api and job runner, too": (
        ServeSettings
    ),
    "`mlx_parallm_train`: the trainer": TrainSettings,
    "`mlx_parallm_learners`: the training service": LearnersSettings,
}


def reference() -> str:
    """The whole page."""
    return "\n".join(
        [
            "# Reference",
            "",
            "Written by `python docs/generate.py`; do not edit.",
            "",
            *settings_section(),
            *keys_section(),
            *metrics_section(),
            *errors_section(),
        ]
    )


def settings_section() -> list[str]:
    lines = [
        "## Settings",
        "",
        "Flags win over the environment (`PARALLM_*`), the environment over YAML (`--config FILE`), YAML over the",
        "defaults. An unknown flag or YAML key is an error. `--dry-run` prints what was resolved.",
        "",
    ]
    for title, kind in SETTINGS.items():
        lines += table(title, kind)
    return lines


def table(title: str, kind: type[ProcessSettings]) -> list[str]:
    lines = [f"### {title}", "", "| flag | environment | default | meaning |", "|---|---|---|---|"]
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


def keys_section() -> list[str]:
    lines = ["## Redis keys", "", "| key | type | owner | time to live | meaning |", "|---|---|---|---|---|"]
    lines += [f"| `{k.pattern}` | {k.type} | {k.owner} | {k.ttl} | {k.meaning} |" for k in keys.DOCUMENTED]
    return [*lines, ""]


def metrics_section() -> list[str]:
    lines = [
        "## Metrics",
        "",
        "`GET /metrics` of any api process tells of the whole ring, in Prometheus' text format. Names with `vllm:` are",
        "vLLM's. Counters and histograms are sums over all processes, dead ones included.",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{m.name}` | {m.kind} | {', '.join(m.labels)} | {m.meaning} |" for m in CATALOGUE.values()]
    return [*lines, ""]


def errors_section() -> list[str]:
    lines = [
        "## Errors",
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when the page is out of date")
    if parser.parse_args().check:
        return 0 if TARGET.read_text() == reference() else 1
    TARGET.write_text(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
