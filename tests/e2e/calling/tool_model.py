"""The tiny model under a chat template that knows tools and reasoning, written after Qwen3's."""

import json
import shutil
from pathlib import Path

from tests.e2e.rings import ROOT

TEMPLATE = r"""{%- if tools %}
{{- '<|im_start|>system\n' }}
{{- "# Tools\n<tools>" }}
{%- for tool in tools %}
{{- "\n" }}{{- tool | tojson }}
{%- endfor %}
{{- "\n</tools>\nCall one with <tool_call>\n{\"name\": <name>, \"arguments\": <arguments>}\n</tool_call><|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for tool_call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking %}{{- '<think>\n' }}
{%- else %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""


def write_tool_model(folder: Path) -> Path:
    """A copy of models/tiny with that template."""
    shutil.copytree(ROOT / "models" / "tiny", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return folder
