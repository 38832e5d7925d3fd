"""Open WebUI, unmodified, finds the model by OpenAI's and by Ollama's API and chats by both, whole and streamed."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import requests

URL, MODEL = os.environ["PARALLM_URL"], os.environ["PARALLM_MODEL_NAME"]
STARTS_S = 400  # it makes its database first


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def surroundings(folder: str) -> dict[str, str]:
    """A database of its own, nothing from the network, and this ring by both of its APIs."""
    return {
        **os.environ,
        "DATA_DIR": folder,
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "of-this-run",
        "OFFLINE_MODE": "true",
        "RAG_EMBEDDING_ENGINE": "openai",  # else it would load a model of its own
        "OPENAI_API_BASE_URL": f"{URL}/v1",
        "OPENAI_API_KEY": "none",
        "OLLAMA_BASE_URL": URL,
        "ENABLE_OLLAMA_API": "true",
    }


def ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + STARTS_S
    while time.monotonic() < until:
        assert process.poll() is None, "it has ended"
        try:
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        except requests.ConnectionError:
            time.sleep(1)
    raise AssertionError(f"not ready after {STARTS_S} s")


class App:
    """The running app, asked as its own page asks it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http = requests.Session()
        signed = self.post("/api/v1/auths/signin", {"email": "", "password": ""}).json()
        self._http.headers["Authorization"] = f"Bearer {signed['token']}"

    def get(self, path: str) -> Any:
        answer = self._http.get(self._url + path, timeout=120)
        assert answer.ok, (path, answer.status_code, answer.text[:500])
        return answer.json()

    def post(self, path: str, body: dict[str, Any]) -> requests.Response:
        answer = self._http.post(self._url + path, json=body, timeout=300)
        assert answer.ok, (path, answer.status_code, answer.text[:500])
        return answer


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        program = [str(Path(sys.executable).parent / "open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(program, env=surroundings(folder), cwd=folder, stdout=log, stderr=log)
            try:
                ready(f"http://127.0.0.1:{port}", process)
                chat(App(f"http://127.0.0.1:{port}"))
            finally:
                process.terminate()
                process.wait()


def chat(app: App) -> None:
    by_openai = {model["id"] for model in app.get("/api/models")["data"]}
    assert MODEL in by_openai, by_openai
    by_ollama = {model["name"] for model in app.get("/ollama/api/tags")["models"]}
    assert any(name.startswith(MODEL) for name in by_ollama), by_ollama
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "temperature": 0}
    whole = app.post("/api/chat/completions", {**asked, "stream": False}).json()
    text = whole["choices"][0]["message"]["content"]
    assert text and whole["usage"]["completion_tokens"] > 0, whole
    lines = app.post("/api/chat/completions", {**asked, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk.get("choices"))
    assert streamed == text, (streamed, text)
    options = {"num_predict": 24, "temperature": 0}
    ollama = {"model": next(iter(by_ollama)), "messages": asked["messages"], "options": options}
    said = [json.loads(line) for line in app.post("/ollama/api/chat", ollama).text.splitlines()]
    assert "".join(each["message"]["content"] for each in said) == text, said
    print(f"Open WebUI {version('open-webui')}: models and chats by OpenAI's and Ollama's API")


main()
