"""Write docs/reference.md from the code: settings, Redis keys, errors. `python docs/generate.py [--check]`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from shared import errors
from shared.metrics import CATALOGUE
from shared.redis import keys
from shared.settings import ApiSettings, ProcessSettings, RunnerSettings, ServeSettings, WorkerSettings
from trainer.settings import TrainSettings

TARGET = Path(__file__).parent / "reference.md"
COMMANDS = {
    "mlx_parallm_serve": (ServeSettings, "all processes on one machine; takes the settings of the others too"),
    "mlx_parallm_worker": (WorkerSettings, "one worker"),
    "mlx_parallm_train": (TrainSettings, "the trainer"),
    "python -m api": (ApiSettings, "one api process"),
    "python -m worker.jobs": (RunnerSettings, "one job runner"),
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
    seen: set[str] = set()
    for kind, title in ((ProcessSettings, "Every process"),):
        lines += table(title, kind, seen)
    for command, (kind, meaning) in reversed(COMMANDS.items()):
        lines += table(f"`{command}`: {meaning}", kind, seen)
    return lines


def table(title: str, kind: type[ProcessSettings], seen: set[str]) -> list[str]:
    lines = [f"### {title}", "", "| flag | environment | default | meaning |", "|---|---|---|---|"]
    for name, field in kind.model_fields.items():
        if name in seen:
            continue
        seen.add(name)
        variable = "PARALLM_REDIS_URL" if name == "redis" else f"PARALLM_{name.upper()}"
        default = shown(field.get_default(call_default_factory=False))
        lines.append(f"| `--{name.replace('_', '-')}` | `{variable}` | {default} | {field.description or ''} |")
    return [*lines, ""]


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
        "vLLM's.",
        "Counters and histograms are sums over all processes, dead ones included.",
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
