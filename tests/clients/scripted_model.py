"""A worker that answers coding agents as a good model would: `python -m tests.clients.scripted_model --redis URL`.

The tokens go through the ring as any worker's. What the model sees is JSON, so that the script can read it: the tools
and the messages of a chat. Asked to mend `calc.py`, it reads the file, edits it, runs its test and says so, with
whichever tools the agent offers; where there are none, it answers in the form that aider reads. Anything else that an
agent asks (a title, a topic) gets a few words.

`cached_tokens` of its answers count how much of a prompt begins as an earlier prompt and its answer did: what a prefix
cache could reuse at most.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

import msgspec

from shared.frames import Finish
from shared.redis.connection.client import connect
from shared.sequences import SequenceSpec
from shared.text.codec import TokenizerBundle
from tests.clients import obedient
from tests.redis import scripted_worker
from tests.redis.scripted_worker import Answer, ScriptedWorker
from tests.unit.api_texts import bundle, codec

MODEL = "scripted"
CONTEXT = 400_000  # tokens, of which each is a byte
TASK = "The function add in calc.py is wrong. Mend it, run python3 test_calc.py, and say DONE when it passes."
WRONG, RIGHT = "return a - b", "return a + b"
RUN = "python3 test_calc.py"
DONE = "DONE: add returns the sum now, and test_calc.py passes."
# Tools first, since they stay; a later turn's text begins as an earlier one's did. The mark is that of Hermes' calls.
TEMPLATE = """{"tools": {{ tools | default([], true) | tojson }}, "messages": [{% for message in messages -%}
{{ message | tojson }}{% if not loop.last %},
{% endif %}{% endfor %}]}{% if false %}<tool_call>{% endif %}"""
# With reasoning, which a request's effort asks for.
OBEYED = TEMPLATE.replace('{"tools"', '{"effort": {{ reasoning_effort | default(none) | tojson }}, "tools"').replace(
    "<tool_call>", "<think></think><tool_call>"
)
PATCH = f"""*** Begin Patch
*** Update File: calc.py
@@
-    {WRONG}
+    {RIGHT}
*** End Patch"""

Call = tuple[str, dict[str, Any]]


def tokenizer(template: str = TEMPLATE) -> TokenizerBundle:
    plain = bundle()
    return TokenizerBundle(plain.tokenizer_json, template, plain.eos_token_ids, plain.special_tokens)


def card(shown: TokenizerBundle) -> Any:
    return msgspec.structs.replace(
        scripted_worker.CARD, name=MODEL, context_length=CONTEXT, tokenizer_sha256=shown.sha256
    )


class Script:
    """Answers by what has been done so far, which the chat itself says."""

    def __init__(self, folder: str, *, delegates: bool = False, obeys: bool = False) -> None:
        self._folder = folder  # of the repository
        self._delegates = delegates
        self._obeys = obeys
        self._seen: list[tuple[int, ...]] = []  # prompts with their answers

    def __call__(self, spec: SequenceSpec) -> Answer:
        chat, cached = chat_of(codec().decode(spec.prompt_ids)), self._common(spec.prompt_ids)
        text = obedient.answer(chat, spec.sampling.grammar) if self._obeys else self._answer(chat)
        print(json.dumps({"prompt": len(spec.prompt_ids), "cached": cached}), flush=True)
        answer = Answer(text, Finish("stop", cached_tokens=cached))
        self._seen = [*self._seen[-31:], (*spec.prompt_ids, *answer.tokens)]
        return answer

    def _common(self, prompt: tuple[int, ...]) -> int:
        return max((common(prompt, earlier) for earlier in self._seen), default=0)

    def _answer(self, chat: dict[str, Any]) -> str:
        tools = {tool["function"]["name"]: tool["function"] for tool in chat["tools"]}
        messages = chat["messages"]
        task = max((at for at, each in enumerate(messages) if is_task(each)), default=None)
        if task is None:
            return "Mend add in calc.py"
        if not tools:
            return (
                aider_answer() if "SEARCH" in text_of(messages[0]) or "file listing" in json.dumps(messages) else DONE
            )
        done = sum(len(each.get("tool_calls") or ()) for each in messages[task:])
        steps = self._steps(tools)
        if done >= len(steps):
            return DONE
        name, arguments = steps[done]
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    def _steps(self, tools: dict[str, Any]) -> list[Call]:
        """The calls to make, with the tools that there are."""
        if self._delegates and "Agent" in tools:
            return [("Agent", {"description": "Mend add", "prompt": TASK, "subagent_type": "general-purpose"})]
        read = first(tools, READERS, self._folder)
        edit = first(tools, EDITORS, self._folder)
        run = first(tools, RUNNERS, RUN)
        if read is None:
            read = first(tools, RUNNERS, "cat calc.py")
        if edit is None:
            edit = first(tools, RUNNERS, f"sed -i 's/{WRONG}/{RIGHT}/' calc.py")
        return [each for each in (read, edit, run) if each is not None]


def chat_of(prompt: str) -> dict[str, Any]:
    """The chat that a prompt shows; a prompt of /v1/completions is what a user says."""
    try:
        chat = json.loads(prompt)
    except ValueError:
        chat = None
    return chat if isinstance(chat, dict) else {"tools": [], "messages": [{"role": "user", "content": prompt}]}


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def is_task(message: dict[str, Any]) -> bool:
    return message["role"] == "user" and TASK in text_of(message)


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else json.dumps(content)


def first(tools: dict[str, Any], known: dict[str, Callable[[str], dict[str, Any]]], about: str) -> Call | None:
    """A call of the first of these tools that there is, with those of the arguments that it has."""
    name = next((name for name in known if name in tools), None)
    if name is None:
        return None
    taken = tools[name]["parameters"]["properties"]
    return name, {key: value for key, value in known[name](about).items() if key in taken}


READERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "Read": lambda folder: dict.fromkeys(("file_path", "filepath"), f"{folder}/calc.py"),  # Claude Code, Continue
    "read": lambda folder: {"filePath": f"{folder}/calc.py"},  # opencode
    "read_file": lambda folder: {"file_path": f"{folder}/calc.py"},  # qwen-code
    "view": lambda folder: {"file_path": f"{folder}/calc.py"},  # Crush
}
EDITORS: dict[str, Callable[[str], dict[str, Any]]] = {
    "Edit": lambda folder: {"file_path": f"{folder}/calc.py", "old_string": WRONG, "new_string": RIGHT},
    "edit": lambda folder: {  # opencode, qwen-code
        **dict.fromkeys(("file_path", "filePath"), f"{folder}/calc.py"),
        **dict.fromkeys(("old_string", "oldString"), WRONG),
        **dict.fromkeys(("new_string", "newString"), RIGHT),
    },
    "replace": lambda folder: {"file_path": f"{folder}/calc.py", "old_string": WRONG, "new_string": RIGHT},
    "apply_patch": lambda folder: {"input": PATCH},  # Codex: a custom tool, whose one text is `input`
}
RUNNERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "Bash": lambda command: {"command": command, "description": "Run a command"},
    "bash": lambda command: {"command": command, "description": "Run a command"},
    "run_shell_command": lambda command: {"command": command, "description": "Run a command", "is_background": False},
    "exec_command": lambda command: {"cmd": command},  # Codex
    "shell_command": lambda command: {"command": command},
    "shell": lambda command: {"command": ["bash", "-lc", command]},
}


def aider_answer() -> str:
    return f"calc.py\n```\ndef add(a, b):\n    {RIGHT}\n```\n\n{DONE}"


async def serve(url: str, script: Script, template: str) -> None:
    shown = tokenizer(template)
    redis = connect(url)
    worker = ScriptedWorker(redis, script, id=f"scripted-{os.getpid()}", card=card(shown), tokenizer=shown)
    await worker.join()
    print("scripted worker ready", flush=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.run())
        while True:  # a machine that stops for longer than the worker's key lives has lost it
            await asyncio.sleep(2)
            await worker.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--folder", default="", help="the repository that the agent works in")
    parser.add_argument("--obey", action="store_true", help="follow what a chat says (tests/clients/obedient.py)")
    parser.add_argument(
        "--delegate", action="store_true", help="let another agent do it, where there is a tool for that"
    )
    arguments = parser.parse_args()
    script = Script(arguments.folder, delegates=arguments.delegate, obeys=arguments.obey)
    asyncio.run(serve(arguments.redis, script, OBEYED if arguments.obey else TEMPLATE))


if __name__ == "__main__":
    main()
