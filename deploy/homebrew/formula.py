"""Prints a Homebrew formula for a release, whose source lies at an address as a tarball.

`python deploy/homebrew/formula.py TARBALL --url URL --homepage URL > mlx-parallm.rb`. The formula belongs into a tap:
packages come from PyPI, in the versions of requirements.lock, which Homebrew's own taps do not allow.
"""

import argparse
import hashlib
import re
import tarfile
from pathlib import Path

FORMULA = """class MlxParallm < Formula
  include Language::Python::Virtualenv

  desc "LLM service of several Macs that learns, on MLX behind a Redis queue"
  homepage "{homepage}"
  url "{url}"
  version "{version}"
  sha256 "{sha256}"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@{python}"

  def install
    constraints = File.read("requirements.lock").scan(/^[\\w.-]+==[^\\s;\\\\]+/)
    (buildpath/"constraints.txt").write constraints.join("\\n")
    venv = virtualenv_create(libexec, "python{python}")
    system "python{python}", "-m", "pip", "--python=#{{libexec}}/bin/python", "install",
           "--constraint=constraints.txt", *dependencies
    venv.pip_install_and_link buildpath
  end

  def dependencies
    text = File.read("pyproject.toml")[/^dependencies = \\[$(.*?)^\\]$/m, 1]
    text.scan(/^\\s+"([^"]+)"/).flatten
  end

  test do
    assert_match version.to_s, shell_output("#{{bin}}/mlx_parallm --version")
    assert_match "architecture", shell_output("#{{bin}}/mlx_parallm doctor --json")
  end
end
"""
PYTHON = "3.13"


def formula(tarball: Path, url: str, homepage: str) -> str:
    """The text of the formula; ValueError for a file that is no source of this project."""
    with tarfile.open(tarball) as archive:
        name = next((each for each in archive.getnames() if re.fullmatch(r"[^/]+/pyproject\.toml", each)), None)
        file = None if name is None else archive.extractfile(name)
        found = None if file is None else re.search(r'^version = "([^"]+)"$', file.read().decode(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{tarball} has no pyproject.toml with a version")
    sha256 = hashlib.sha256(tarball.read_bytes()).hexdigest()
    return FORMULA.format(homepage=homepage, url=url, version=found[1], sha256=sha256, python=PYTHON)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print a Homebrew formula for a release.")
    parser.add_argument("tarball", type=Path)
    parser.add_argument("--url", required=True, help="where the tarball lies")
    parser.add_argument("--homepage", required=True)
    args = parser.parse_args()
    print(formula(args.tarball, args.url, args.homepage), end="")


if __name__ == "__main__":
    main()
