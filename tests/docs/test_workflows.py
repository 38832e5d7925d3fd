"""What CI is told to run is there; actionlint, which checks the rest, is run by hand (CONTRIBUTING.md)."""

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.e2e.rings import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
JOBS = {
    f"{path.name}:{name}": job for path in WORKFLOWS for name, job in yaml.safe_load(path.read_text())["jobs"].items()
}


def test_tests_and_demo_run_on_both_systems() -> None:
    matrix = JOBS["ci.yml:make"]["strategy"]["matrix"]
    assert set(matrix["target"]) == {"test", "demo"}
    assert sorted(name.partition("-")[0] for name in matrix["os"]) == ["macos", "ubuntu"]
    for target in matrix["target"]:
        asked = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert asked.returncode == 0, asked.stderr


@pytest.mark.parametrize("job", JOBS.values(), ids=list(JOBS))
def test_a_job_ends_and_names_the_versions_of_what_it_uses(job: dict[str, Any]) -> None:
    assert job["timeout-minutes"]
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", action) for action in used), used
    for step in job["steps"]:
        path = step.get("with", {}).get("cache-dependency-path")
        assert path is None or (ROOT / path).is_file(), path
