"""`mlx_parallm replay`: compute recorded tokens again (api/rl/replay.py)."""

from typing import Annotated, Any

import typer

from api.cli.client import DEFAULT_URL
from api.cli.console import ApiKey, Json, Url, call, out, print_json, print_rows

WRONG = 3


def replay(
    name: Annotated[str, typer.Argument(metavar="ID", help="id of a completion, a sequence or a job's sample")],
    worker: Annotated[str, typer.Option(help="id of the worker that computes it again; default: any")] = "",
    bound: Annotated[
        float | None, typer.Option(min=0, max=1, help="difference of probability that counts as a tie")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Json = False,
) -> None:
    """Compute a recorded completion again and compare it token by token; exit code 3 if tokens are wrong."""
    body = {"id": name, "worker": worker, **({} if bound is None else {"bound": bound})}
    reports = call(url, api_key, "POST", "/v1/replay", body)["data"]
    if as_json:
        print_json(reports)
    else:
        for report in reports:
            _show(report)
    if any(report["verdict"] == "wrong" for report in reports):
        raise typer.Exit(WRONG)


def _show(report: dict[str, Any]) -> None:
    counts = ", ".join(f"{report[key]} {label}" for key, label in _COUNTS if report[key])
    by = ", ".join(report["replayed_by"]) or "no worker"
    out.print(f"{report['id']}: {report['verdict']}; of {report['tokens']} tokens {counts or 'none'}", soft_wrap=True)
    out.print(
        f"  written by {report['worker']}, replayed by {by}; bound {report['bound']:g}, "
        f"largest gap within it {report['largest_gap']:.2g}",
        soft_wrap=True,
    )
    if note := report.get("note"):
        out.print(f"  not judged: {note}", soft_wrap=True)
    if differences := report.get("differences"):
        print_rows(("position", "verdict", "token", "replayed", "p", "p replayed", "gap"), map(_row, differences))


def _row(difference: dict[str, Any]) -> tuple[str, ...]:
    probabilities = (f"{difference[key]:.4f}" for key in ("probability", "replayed_probability", "gap"))
    return (*(str(difference[key]) for key in ("position", "verdict", "token", "replayed")), *probabilities)


_COUNTS = (("same", "same"), ("ties", "within a tie"), ("wrong", "wrong"), ("not_judged", "not judged"))
