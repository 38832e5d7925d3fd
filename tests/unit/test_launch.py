"""What coding agents are started with: the server, the model, its limits, and no file of the user's."""

import json
import os
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api.cli import launch
from api.cli.agents import AGENTS, Served
from api.cli.main import app

SERVED = Served("http://ring:8000", "a-secret", "qwen", 100_000, 25_000)
FOLDER = Path("/its/folder")


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_learns_server_model_and_limits(name: str) -> None:
    setup = AGENTS[name].set_up(SERVED, FOLDER)
    said = json.dumps([setup.environment, setup.arguments, setup.files])
    for word in ("http://ring:8000", "qwen", "100000", "a-secret"):
        assert word in said, word
    assert "25000" in said or "75000" in said, "how long an answer is, or when to compact"
    assert not any(Path(file).is_absolute() or ".." in file for file in setup.files)


def test_files_are_what_their_agents_read() -> None:
    for name in ("claude", "opencode", "crush", "qwen-code", "aider"):
        for text in AGENTS[name].set_up(SERVED, FOLDER).files.values():
            json.loads(text)
    assert json.loads(AGENTS["codex"].set_up(SERVED, FOLDER).files["models.json"]) == {}
    codex = tomllib.loads(AGENTS["codex"].set_up(SERVED, FOLDER).files["config.toml"])
    assert codex["model_providers"][codex["model_provider"]]["base_url"] == "http://ring:8000/v1"
    assert codex["model_auto_compact_token_limit"] + 25_000 == codex["model_context_window"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(launch, "ask", lambda *_: SERVED)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_an_agent_that_is_not_installed_is_named_with_its_installation(served: Path) -> None:
    answer = CliRunner().invoke(app, ["launch", "codex"])
    assert answer.exit_code == 2 and "npm install -g @openai/codex" in answer.output
    unknown = CliRunner().invoke(app, ["launch", "emacs"])
    assert unknown.exit_code == 2 and "opencode" in unknown.output


def test_print_shows_all_but_the_key_and_writes_nothing(served: Path) -> None:
    answer = CliRunner().invoke(app, ["launch", "opencode", "--print", "--", "run", "a task"])
    assert answer.exit_code == 0
    assert "OPENCODE_CONFIG=" in answer.output and "opencode run 'a task'" in answer.output
    assert "a-secret" not in answer.output and not (served / "state").exists()


def test_the_agent_runs_with_its_own_files_and_without_other_keys(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = served / "claude"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of another server")
    ran: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *call: ran.append(call))
    assert CliRunner().invoke(app, ["launch", "claude", "--", "-p", "hello"]).exit_code == 0
    ((path, command, environment),) = ran
    assert path == str(program) and command[-2:] == ["-p", "hello"]
    assert environment["ANTHROPIC_BASE_URL"] == "http://ring:8000" and "ANTHROPIC_API_KEY" not in environment
    settings = Path(command[command.index("--settings") + 1])
    assert settings.is_relative_to(served / "state") and settings.stat().st_mode & 0o077 == 0
    assert json.loads(settings.read_text())["env"]["ANTHROPIC_AUTH_TOKEN"] == "a-secret"
