"""`mlx_parallm doctor`. Works without a server; it changes nothing but the file that `--tune` writes."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.console import Json, fail, out, print_json
from api.doctor.finding import Finding, Status, note
from api.doctor.machine import disk_check, machine_checks, mlx_device
from api.doctor.tuning import invariance_check
from api.doctor.tuning import tune as tuned
from shared.machine.system import this_system

SIGNS: dict[Status, str] = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}


def doctor(
    model: Annotated[
        str, typer.Option("--model", "-m", help="model folder or hub name, to check that it is complete and fits")
    ] = "",
    redis: Annotated[str, typer.Option(help="Redis URL of the ring; default: the embedded one")] = "",
    host: Annotated[str, typer.Option(help="address on which the server is to listen")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    tune: Annotated[
        bool, typer.Option("--tune", help="measure --model on this machine for later starts; takes minutes")
    ] = False,
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="check that this machine keeps --batch-invariant for --model"),
    ] = False,
    out_file: Annotated[
        str, typer.Option("--out", help="file that --tune writes; default: the one that workers read")
    ] = "",
    as_json: Json = False,
) -> None:
    """Check this machine and recommend what to do. Exit code 1: something would prevent a ring from running."""
    from api.doctor.model import model_checks  # loads settings and Redis' client, which few commands need
    from api.doctor.network import network_checks

    if tune and not model:
        fail("--tune measures a model: give --model", 2)
    if batch_invariant and not model:
        fail("--batch-invariant checks a model: give --model", 2)
    device = mlx_device()
    findings = [*machine_checks(device), disk_check(Path.home()), *network_checks(this_system(), redis, host, port)]
    if model:
        findings += model_checks(model, device)
    if batch_invariant and not any(each.status == "wrong" for each in findings if each.check in ("mlx", "model")):
        findings.append(invariance_check(model))
    figures: dict[str, Any] = {}
    if tune and os.getloadavg()[0] > (os.cpu_count() or 1) / 2:
        findings.append(note("tune", "other programs compute meanwhile", "measure again when nothing else runs"))
    _say(findings, as_json=as_json)  # measuring takes minutes
    if tune and not any(each.status == "wrong" for each in findings if each.check in ("mlx", "model", "fit")):
        found, figures = tuned(model, out_file)
        findings.append(found)
        _say([found], as_json=as_json)
    is_wrong = any(each.status == "wrong" for each in findings)
    if as_json:
        print_json({"ok": not is_wrong, "findings": findings, "device": device, "measured": figures})
    raise typer.Exit(int(is_wrong))


def _say(findings: list[Finding], *, as_json: bool) -> None:
    for each in () if as_json else findings:
        out.print(_line(each), markup=False)


def _line(finding: Finding) -> str:
    line = f"{SIGNS[finding.status]} {finding.check:12} {finding.found}"
    return f"{line}\n                   -> {finding.do}" if finding.do else line
