"""The commands of a page, run as they stand, with free ports, in this virtual environment and a folder of the test."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.e2e.rings import ROOT, Process
from tests.waiting import HANG_S

BIN = Path(sys.executable).parent
STAYS = re.compile(r"^mlx_parallm_(serve|worker|learners) ")  # a program that runs until it is stopped
READY = {"serve": "join with another worker", "worker": "worker.ready", "learners": "learners.ready"}


def blocks(text: str) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", text, re.DOTALL)


# What starts the server of README and quickstart.
[START] = [text for text in blocks((ROOT / "docs/quickstart.md").read_text()) if text.startswith("mlx_parallm_serve")]


class Shell:
    """Runs a page's text in a folder that looks like a checkout."""

    def __init__(self, folder: Path) -> None:
        ports = []
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as listener:
                ports.append(str(listener.getsockname()[1]))
        self.http, self.redis = ports
        self.folder = folder
        for name in ("models", "examples", "trainer"):
            (folder / name).symlink_to(ROOT / name)
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PARALLM_URL": f"http://127.0.0.1:{self.http}",
            "PYTHONPATH": str(ROOT),
        }

    def text(self, command: str) -> str:
        command = re.sub(r"--steps \d+", "--steps 1", command)
        return command.replace("8000", self.http).replace("36379", self.redis)

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", self.text(command)],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout or done.stderr

    def start(self, command: str) -> Process:
        return Process(
            subprocess.Popen(
                ["bash", "-euc", "exec " + self.text(command).strip()],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
