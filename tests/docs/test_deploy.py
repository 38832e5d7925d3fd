"""The files that deploy us name settings, flags and files that exist."""

import hashlib
import io
import plistlib
import re
import subprocess
import sys
import tarfile
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from shared.process.serve_settings import ServeSettings
from shared.process.settings import load
from shared.process.worker_settings import WorkerSettings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def resolves(command: list[str]) -> None:
    """The command line is understood: `--dry-run` prints its settings and exits 0."""
    kind = {"mlx_parallm_serve": ServeSettings, "mlx_parallm_worker": WorkerSettings}[Path(command[0]).name]
    flags = [word for word in command[1:] if not word.endswith(".yaml") and word != "--config"]
    with pytest.raises(SystemExit) as stopped:
        load(kind, [*flags, "--dry-run"])
    assert stopped.value.code == 0


def test_compose_sets_variables_that_are_settings() -> None:
    names = {f"PARALLM_{name.upper()}" for name in ServeSettings.model_fields} | {"PARALLM_REDIS_URL"}
    variables = set(COMPOSE["services"]["api"]["environment"])
    dockerfile = (ROOT / "Dockerfile").read_text()
    variables |= set(re.findall(r"(PARALLM_\w+)=", dockerfile))
    assert variables <= names


def test_the_image_has_what_compose_can_switch_on() -> None:
    assert "PARALLM_OTLP_ENDPOINT" in COMPOSE["services"]["api"]["environment"]
    extras = re.findall(r"'mlx-parallm\[([a-z,]+)\]'", (ROOT / "Dockerfile").read_text())
    assert all("traces" in each.split(",") for each in extras) and extras


def test_compose_mounts_files_that_exist() -> None:
    mounts = [volume for service in COMPOSE["services"].values() for volume in service.get("volumes", [])]
    files = [volume.split(":")[0] for volume in mounts if volume.startswith("./")]
    assert len(files) == 3 and all((ROOT / file).exists() for file in files)


def test_compose_asks_for_every_secret_and_holds_none() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert all(f"{name}:?" in text for name in ("REDIS_PASSWORD", "API_KEY", "GRAFANA_PASSWORD"))


def test_the_images_start_commands_of_ours_and_the_last_one_is_a_front_without_workers() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    commands = [yaml.safe_load(found) for found in re.findall(r"^CMD (\[.*\])$", dockerfile, re.MULTILINE)]
    assert [command[0] for command in commands] == ["mlx_parallm_worker", "mlx_parallm_serve"]
    assert "--workers" in commands[-1]
    for command in commands:
        resolves(command)
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE)
    assert copied and all((ROOT / name).exists() for names in copied for name in names.split())


@pytest.mark.parametrize("unit", sorted((ROOT / "deploy/systemd").glob("*.service")), ids=lambda path: path.name)
def test_systemd_units_start_commands_of_ours(unit: Path) -> None:
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    resolves(parser["Service"]["ExecStart"].split())
    grace = WorkerSettings.model_fields["drain_grace_s"].default
    assert int(parser["Service"]["TimeoutStopSec"]) > grace, "systemd would kill what still drains"


def test_the_launchd_job_starts_a_worker_and_lets_it_drain() -> None:
    job = plistlib.loads((ROOT / "deploy/launchd/com.parallm.worker.plist").read_bytes())
    resolves(job["ProgramArguments"])
    assert job["ExitTimeOut"] > WorkerSettings.model_fields["drain_grace_s"].default


def test_grafana_is_provisioned_with_our_board() -> None:
    [provider] = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/parallm.yml").read_text())["providers"]
    folder = provider["options"]["path"]
    targets = [volume.split(":")[1] for volume in COMPOSE["services"]["grafana"]["volumes"]]
    assert any(target.startswith(folder) for target in targets)


def test_a_formula_has_the_release_s_checksum_and_names_what_is_there(tmp_path: Path) -> None:
    tarball = tmp_path / "mlx-parallm-9.8.7.tar.gz"
    with tarfile.open(tarball, "w:gz") as archive:
        text = (ROOT / "pyproject.toml").read_text().replace('version = "0.1.0"', 'version = "9.8.7"').encode()
        entry = tarfile.TarInfo("mlx-parallm-9.8.7/pyproject.toml")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    command = [sys.executable, "deploy/homebrew/formula.py", str(tarball)]
    options = ["--url", "https://example.com/r.tar.gz", "--homepage", "https://example.com"]
    told = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert hashlib.sha256(tarball.read_bytes()).hexdigest() in told and 'version "9.8.7"' in told
    (desc,) = re.findall(r'^  desc "(.*)"$', told, re.MULTILINE)
    assert len(desc) < 80 and not desc.endswith("."), "brew audit"
    assert not re.match(r"(?i)(a|an|the|mlx.?parallm)\b", desc), "brew audit"
    assert told.isascii() and max(map(len, told.splitlines())) <= 118
    # What the formula finds in our files by the same patterns.
    lock, project = (ROOT / "requirements.lock").read_text(), (ROOT / "pyproject.toml").read_text()
    pinned = {line.partition("==")[0] for line in re.findall(r"^[\w.-]+==[^\s;\\]+", lock, re.MULTILINE)}
    listed = re.search(r"^dependencies = \[$(.*?)^\]$", project, re.MULTILINE | re.DOTALL)
    assert listed is not None
    wanted = re.findall(r'^\s+"([^"]+)"', listed[1], re.MULTILINE)
    assert len(wanted) > 20 and {re.split(r"[\[=><;]", each)[0] for each in wanted} <= pinned


def test_a_formula_of_another_tarball_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "other.tar", "w"):
        pass
    command = [
        sys.executable,
        "deploy/homebrew/formula.py",
        str(tmp_path / "other.tar"),
        "--url",
        "u",
        "--homepage",
        "h",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and "no pyproject.toml" in done.stderr
