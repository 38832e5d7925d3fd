"""OpenBLAS stands in front of MLX's own BLAS only where a program puts it there before it imports mlx."""

import subprocess
import sys

import pytest

from tests.e2e.rings import ROOT
from tests.waiting import HANG_S


@pytest.mark.parametrize("program", ["worker", "trainer"])
def test_a_program_that_computes_imports_no_mlx_before_it_has_read_its_settings(program: str) -> None:
    code = f"import sys, {program}.__main__; print('mlx.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout.strip() == "False", done.stderr
