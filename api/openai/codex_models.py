"""Models as Codex reads them: the array `models` of GET /v1/models for a client that says its version.

Codex takes what it has to know of a model from there, such as the length of its context, and whether it may edit files
by a patch in a custom tool's text, whose grammar this server enforces (`text_forms.py`).
"""

from typing import Any

# Codex sends these words with each request, ahead of its own on permissions, skills and the environment.
INSTRUCTIONS = """You are a coding agent that works in a user's folder through tools.

- Read the files that matter before you change anything, and search for what you do not know.
- Change files with the tool apply_patch. Keep changes small, in the style of the code around them.
- Give the command that runs or tests your change, run it, and read what it prints. Mend what fails.
- Never undo changes that you have not made, and ask before anything that cannot be undone.
- Go on until the task is done. Then say in a few sentences what you changed and what you saw when you ran it."""


def codex_model(name: str, context: int, *, sees: bool) -> dict[str, Any]:
    """A model in Codex' shape. `context`: tokens of the longest conversation; `sees`: it takes images."""
    return {
        "slug": name,
        "display_name": name,
        "description": None,
        "supported_reasoning_levels": [],
        "shell_type": "unified_exec",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "availability_nux": None,
        "upgrade": None,
        "base_instructions": INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": context,
        "max_context_window": context,
        "effective_context_window_percent": 95,
        "experimental_supported_tools": [],
        "input_modalities": ["text", "image"] if sees else ["text"],
    }
