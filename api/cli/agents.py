"""Coding agents, and how each is told which server and which model to use.

An agent gets environment variables, arguments and files of its own for the run; the user's own files are not touched.
What an agent would take for a key of its maker's service is taken out of its environment.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROVIDER = "parallm"
NO_KEY = "none"  # some agents refuse to start without any
PATIENCE_S = 1800  # that an agent waits for the next token: some give up after two minutes, and begin anew


@dataclass(frozen=True)
class Served:
    """The server and the model that an agent is to use."""

    url: str  # without /v1
    key: str
    model: str
    context: int  # tokens of the longest conversation
    answer: int  # tokens of the longest answer
    catalog: str = "{}"  # JSON of the models as Codex reads them

    @property
    def openai_url(self) -> str:
        """Address of the endpoints of OpenAI."""
        return f"{self.url}/v1"


@dataclass(frozen=True)
class Setup:
    """Things that an agent is started with. Paths of `files` are relative to the folder of the run."""

    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # variables that are taken out of the environment


@dataclass(frozen=True)
class CodingAgent:
    """A coding agent that can be started."""

    program: str
    install: str  # command that brings it
    set_up: Callable[[Served, Path], Setup]


def _claude(served: Served, folder: Path) -> Setup:
    models = ("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", *(f"ANTHROPIC_DEFAULT_{each}_MODEL" for each in _SIZES))
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        **dict.fromkeys(models, served.model),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.answer),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),
        **dict.fromkeys(("API_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS"), str(1000 * PATIENCE_S)),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if served.context >= _LEAST_WINDOW:
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(served.context)
    settings = {"env": variables, "model": served.model}  # go before the user's settings, which may name another server
    return Setup(
        environment=variables,
        arguments=("--settings", str(folder / "settings.json")),
        files={"settings.json": _json(settings)},
        without=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_OAUTH_TOKEN"),
    )


_SIZES = ("HAIKU", "SONNET", "OPUS")
_LEAST_WINDOW = (
    100_000  # a smaller one it complains of; then it compacts when the server says that a prompt is too long
)


def _codex(served: Served, folder: Path) -> Setup:
    provider = {
        "name": "ParaLLM",
        "base_url": served.openai_url,
        "env_key": "PARALLM_AGENT_KEY",
        "wire_api": "responses",
        "stream_idle_timeout_ms": 1000 * PATIENCE_S,
    }
    lines = [
        f"model = {json.dumps(served.model)}",
        f'model_provider = "{PROVIDER}"',
        f"model_context_window = {served.context}",
        f"model_catalog_json = {json.dumps(str(folder / 'models.json'))}",
        f"model_auto_compact_token_limit = {max(1, served.context - served.answer)}",
        f"[model_providers.{PROVIDER}]",
        *(f"{name} = {json.dumps(value)}" for name, value in provider.items()),
    ]
    return Setup(
        environment={"CODEX_HOME": str(folder), "PARALLM_AGENT_KEY": served.key},
        files={"config.toml": "\n".join(lines) + "\n", "models.json": served.catalog},
    )


def _opencode(served: Served, folder: Path) -> Setup:
    model = {
        "name": served.model,
        "tool_call": True,
        "limit": {"context": served.context, "output": served.answer},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "ParaLLM",
        "options": {
            "baseURL": served.openai_url,
            "apiKey": served.key,
            **dict.fromkeys(("timeout", "headerTimeout", "chunkTimeout"), 1000 * PATIENCE_S),
        },
        "models": {served.model: model},
    }
    named = f"{PROVIDER}/{served.model}"
    config = {"provider": {PROVIDER: provider}, "model": named, "small_model": named, "autoupdate": False}
    return Setup(
        environment={"OPENCODE_CONFIG": str(folder / "opencode.json"), "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        files={"opencode.json": _json(config)},
    )


def _aider(served: Served, folder: Path) -> Setup:
    limits = {
        "max_tokens": served.answer,
        "max_input_tokens": served.context,
        "max_output_tokens": served.answer,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    named = f"openai/{served.model}"
    files = ("--model-metadata-file", str(folder / "models.json"))
    arguments = ("--model", named, "--weak-model", named, "--timeout", str(PATIENCE_S), *files)
    return Setup(
        environment={
            "OPENAI_API_BASE": served.openai_url,
            "OPENAI_API_KEY": served.key,
            "AIDER_CHECK_UPDATE": "false",
            "AIDER_SHOW_MODEL_WARNINGS": "false",
        },
        arguments=arguments,
        files={"models.json": _json({named: limits})},
    )


def _crush(served: Served, folder: Path) -> Setup:
    model = {
        "id": served.model,
        "name": served.model,
        "context_window": served.context,
        "default_max_tokens": served.answer,
    }
    provider = {
        "name": "ParaLLM",
        "type": "openai-compat",
        "base_url": served.openai_url,
        "api_key": served.key,
        "models": [model],
    }
    chosen = {"provider": PROVIDER, "model": served.model}
    config = {
        "providers": {PROVIDER: provider},
        "models": {"large": chosen, "small": chosen},
        "options": {"disable_metrics": True, "disable_provider_auto_update": True},
    }
    return Setup(environment={"CRUSH_GLOBAL_CONFIG": str(folder)}, files={"crush.json": _json(config)})


def _qwen(served: Served, folder: Path) -> Setup:
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "model": {
            "name": served.model,
            "generationConfig": {
                "contextWindowSize": served.context,
                **dict.fromkeys(("timeout", "streamIdleTimeoutMs"), 1000 * PATIENCE_S),
                "samplingParams": {"max_tokens": served.answer},
            },
        },
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
    }
    return Setup(
        environment={
            "QWEN_HOME": str(folder),
            "OPENAI_BASE_URL": served.openai_url,
            "OPENAI_API_KEY": served.key,
            "OPENAI_MODEL": served.model,
        },
        arguments=("--auth-type", "openai"),
        files={"settings.json": _json(settings)},
    )


def _continue(served: Served, folder: Path) -> Setup:
    model = {
        "name": served.model,
        "provider": "openai",
        "model": served.model,
        "apiBase": served.openai_url,
        "apiKey": served.key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": served.context, "maxTokens": served.answer},
    }
    config = {"name": "ParaLLM", "version": "1.0.0", "schema": "v1", "models": [model]}
    return Setup(
        environment={"CONTINUE_GLOBAL_DIR": str(folder), "CONTINUE_TELEMETRY_ENABLED": "0"},
        arguments=("--config", str(folder / "config.yaml")),
        files={"config.yaml": _json(config)},  # JSON is YAML
    )


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


AGENTS = {
    "claude": CodingAgent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": CodingAgent("codex", "npm install -g @openai/codex", _codex),
    "opencode": CodingAgent("opencode", "npm install -g opencode-ai", _opencode),
    "aider": CodingAgent("aider", "python -m pip install aider-chat", _aider),
    "crush": CodingAgent("crush", "npm install -g @charmland/crush", _crush),
    "continue": CodingAgent("cn", "npm install -g @continuedev/cli", _continue),
    "qwen-code": CodingAgent("qwen", "npm install -g @qwen-code/qwen-code", _qwen),
}
