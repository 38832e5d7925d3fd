"""Checks an installed wheel, outside of the checkout: `make dist` runs it with the Python of a fresh environment.

Every program says its version, and a server answers with its dashboard, its scripts in Redis and its model: the data
files of the packages are in the wheel.
"""

import json
import socket
import subprocess
import sys
import tempfile
import urllib.request
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

BIN = Path(sys.executable).parent
PROGRAMS = ("mlx_parallm", "mlx_parallm_serve", "mlx_parallm_worker", "mlx_parallm_train", "mlx_parallm_learners")


def main() -> None:
    model = Path(sys.argv[1]).resolve()
    for program in PROGRAMS:
        said = subprocess.run([BIN / program, "--version"], capture_output=True, text=True, check=True).stdout
        assert version("mlx-parallm") in said, f"{program}: {said!r}"
    assert any(path.name.endswith(".yaml") for path in files("trainer").joinpath("recipes").iterdir())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        command = [BIN / "mlx_parallm_serve", "--model", model, "--port", url.rpartition(":")[2], "--data-dir", folder]
        server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout and any("ParaLLM is ready" in line for line in server.stdout)
            assert "<html" in urllib.request.urlopen(f"{url}/dashboard").read().decode()
            body = {"model": model.name, "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
            ask = urllib.request.Request(
                f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            answer = json.load(urllib.request.urlopen(ask))["choices"][0]["message"]["content"]
        finally:
            server.terminate()
            server.communicate()
    print(f"mlx-parallm {version('mlx-parallm')} of {files('api')} answers: {answer}")


if __name__ == "__main__":
    main()
