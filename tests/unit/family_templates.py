"""A small chat template for each family, which writes calls and reasoning as the family's published one does."""

from dataclasses import dataclass
from typing import Any

_VALUE = "{{ v if v is string else v | tojson }}"
_BRACES = """{%- macro value(v) -%}
{%- if v is string -%}QUOTE{{ v }}QUOTE
{%- elif v is mapping -%}{
{%- for k, w in v | dictsort -%}{{ k }}:{{ value(w) }}{{ "," if not loop.last }}{%- endfor -%} }
{%- elif v is boolean or v is none or v is number -%}{{ v | tojson }}
{%- else -%}[{%- for w in v -%}{{ value(w) }}{{ "," if not loop.last }}{%- endfor -%}]
{%- endif -%}
{%- endmacro -%}
"""
_NESTED = """{%- macro value(v) -%}
{%- if v is mapping -%}{%- for k, w in v.items() -%}]<]minimax[>[<{{ k }}>{{ value(w) }}]<]minimax[>[</{{ k }}>
{%- endfor -%}
{%- elif v is string -%}{{ v }}{%- elif v is boolean or v is none or v is number -%}{{ v | tojson }}
{%- else -%}{%- for w in v -%}]<]minimax[>[<item>{{ value(w) }}]<]minimax[>[</item>{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""


_VALUES = """{%- macro value(v, name) -%}
{%- if v is mapping -%}<cofl:value{{ name }} type="dict">{{ members(v) }}</cofl:value>
{%- elif v is string -%}<cofl:value{{ name }} type="raw">{{ v }}</cofl:value>
{%- elif v is boolean or v is none or v is number -%}<cofl:value{{ name }} type="json">{{ v | tojson }}</cofl:value>
{%- else -%}<cofl:value{{ name }} type="list">{%- for w in v -%}{{ value(w, "") }}{%- endfor -%}</cofl:value>
{%- endif -%}
{%- endmacro -%}
{%- macro members(v) -%}
{%- for k, w in v.items() -%}{{ value(w, ' name="' ~ k ~ '"') }}{%- endfor -%}
{%- endmacro -%}
"""


@dataclass(frozen=True)
class Shape:
    """What a template writes around calls, and around a thought and an answer."""

    call: str  # NAME, ARGS (JSON), and PARAMS, which stands for all of:
    param: str = ""  # KEY, VALUE, TYPE, STRING
    begin: str = ""
    joint: str = ""
    end: str = ""
    between_params: str = ""
    macros: str = ""
    thought: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    answer: tuple[str, str] = ("", "")
    after: str = ""
    more: str = ""  # text of the template by which it is known
    opens_thought: bool = False  # the prompt ends inside

    @property
    def template(self) -> str:
        """The template: roles and contents in lines, and an assistant's message as the family writes it."""
        param = self.param.replace("KEY", "{{ k }}").replace("VALUE", _VALUE)
        param = param.replace("STRING", '{{ "true" if v is string else "false" }}').replace("TYPE", _TYPE)
        params = (
            f"{{%- for k, v in c.function.arguments.items() -%}}{param}"
            f"{{{{ {self.between_params!r} if not loop.last }}}}{{%- endfor -%}}"
        )
        call = self.call.replace("NAME", "{{ c.function.name }}").replace("PARAMS", params)
        call = call.replace("ARGS", "{{ c.function.arguments | tojson }}").replace("INDEX", "{{ loop.index0 }}")
        written = (
            f"{{%- if m.reasoning_content -%}}{self.thought[0]}{{{{ m.reasoning_content }}}}{self.thought[1]}"
            "{%- endif -%}"
            f"{{%- if m.content -%}}{self.answer[0]}{{{{ m.content }}}}{self.answer[1]}{{%- endif -%}}"
            f"{{%- for c in m.tool_calls or [] -%}}{{{{ {self.begin!r} if loop.first }}}}{call}"
            f"{{{{ {self.joint!r} if not loop.last else {self.end!r} }}}}{{%- endfor -%}}{self.after}"
        )
        told = "{%- for t in tools or [] -%}[tool {{ t.function.name }}]{%- endfor -%}"
        turns = (
            "{%- for m in messages -%}[{{ m.role }}]{%- if m.role == 'assistant' -%}"
            f"{written}{{%- else -%}}{{{{ m.content }}}}{{%- endif -%}}[over]{{%- endfor -%}}"
        )
        begun = self.thought[0] if self.opens_thought else ""
        lines = f"{told}{turns}{{%- if add_generation_prompt -%}}[assistant]{begun}{{%- endif -%}}"
        return f"{self.macros}{{# {self.more} #}}" + lines.replace("\n", '{{ "\\n" }}')


_TYPE = '{{ "string" if v is string else "boolean" if v is boolean else "number" if v is number else "object" }}'
_JSON = '{"name": "NAME", "arguments": ARGS}'
_DEEPSEEK = {"begin": "<｜tool▁calls▁begin｜>", "end": "<｜tool▁calls▁end｜>"}


def _dsml(calls: str, space: str = "") -> Shape:
    return Shape(
        f'<｜DSML｜{space}invoke name="NAME">\nPARAMS\n</｜DSML｜{space}invoke>\n',
        f'<｜DSML｜{space}parameter name="KEY" string="STRING">VALUE</｜DSML｜{space}parameter>',
        begin=f"<｜DSML｜{calls}>\n",
        end=f"</｜DSML｜{calls}>",
        between_params="\n",
        thought=("<think>", "</think>"),
    )


def _hunyuan(of: str, separator: str, line: str) -> Shape:
    return Shape(
        f"<tool_call{of}>NAME{separator}PARAMS{line}</tool_call{of}>\n",
        f"<arg_key{of}>KEY</arg_key{of}>{line}<arg_value{of}>VALUE</arg_value{of}>",
        begin=f"<tool_calls{of}>\n",
        end=f"</tool_calls{of}>",
        between_params=line,
        thought=(f"<think{of}>", f"</think{of}>"),
    )


_COHERE: dict[str, Any] = {
    "thought": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "answer": ("<|START_TEXT|>", "<|END_TEXT|>"),
}
SHAPES = {
    "hermes": Shape(f"<tool_call>\n{_JSON}\n</tool_call>", joint="\n"),
    "qwen3_coder": Shape(
        "<tool_call>\n<function=NAME>\nPARAMS\n</function>\n</tool_call>",
        "<parameter=KEY>\nVALUE\n</parameter>",
        joint="\n",
        between_params="\n",
        more="<tool_call>\n<function=",
    ),
    "seed_oss": Shape(
        "<seed:tool_call>\n<function=NAME>\nPARAMS\n</function>\n</seed:tool_call>",
        "<parameter=KEY>VALUE</parameter>",
        joint="\n",
        between_params="\n",
        thought=("<seed:think>", "</seed:think>"),
    ),
    "glm47": Shape(
        "<tool_call>NAME\nPARAMS\n</tool_call>",
        "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>",
        joint="\n",
        between_params="\n",
    ),
    "longcat": Shape(
        "<longcat_tool_call>NAME\nPARAMS\n</longcat_tool_call>",
        "<longcat_arg_key>KEY</longcat_arg_key>\n<longcat_arg_value>VALUE</longcat_arg_value>",
        joint="\n",
        between_params="\n",
        thought=("<longcat_think>\n", "\n</longcat_think>\n"),
    ),
    "minimax_m2": Shape(
        '<invoke name="NAME">\nPARAMS\n</invoke>\n',
        '<parameter name="KEY">VALUE</parameter>',
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        between_params="\n",
        opens_thought=True,
    ),
    "minimax_m3": Shape(
        ']<]minimax[>[<invoke name="NAME">{{ value(c.function.arguments) }}]<]minimax[>[</invoke>\n',
        begin="]<]minimax[>[<tool_call>\n",
        end="]<]minimax[>[</tool_call>",
        macros=_NESTED,
        thought=("<mm:think>", "</mm:think>"),
    ),
    "kimi_k2": Shape(
        "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGS<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        thought=("<think>", "</think>"),
    ),
    "kimi_k3": Shape(
        '<|open|>call tool="NAME" index="{{ loop.index }}"<|sep|>PARAMS<|close|>call<|sep|>',
        '<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>',
        begin="<|open|>tools<|sep|>",
        end="<|close|>tools<|sep|>",
        thought=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        after="<|close|>message<|sep|>",
        opens_thought=True,
    ),
    "mistral": Shape("[TOOL_CALLS]NAME[{{ 'AR' }}GS]ARGS", thought=("[THINK]", "[/THINK]")),
    "deepseek_v3": Shape(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS\n```<｜tool▁call▁end｜>",
        joint="\n", **_DEEPSEEK,
    ),
    "deepseek_v31": Shape(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>", thought=("<think>", "</think>"), **_DEEPSEEK
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml(" calls", " "),
    "hy_v3": _hunyuan("", "<tool_sep>\n", "\n"),
    "hy_v3_opensource": _hunyuan(":opensource", "<tool_sep:opensource>\n", "\n"),
    "hy_v4": _hunyuan(":opensource", "", ""),
    "cohere_xml": Shape(
        '<cofl:tool_call id="INDEX" name="NAME">PARAMS</cofl:tool_call>',
        '<cofl:tool_param name="KEY" string="STRING">VALUE</cofl:tool_param>',
        begin="<cofl:tool_calls>", end="</cofl:tool_calls>", **_COHERE,
    ),
    "cohere_values": Shape(
        '<cofl:tool_call id="INDEX" name="NAME">{{ members(c.function.arguments) }}</cofl:tool_call>',
        begin="<cofl:tool_calls>", end="</cofl:tool_calls>", macros=_VALUES, **_COHERE,
    ),
    "gemma4": Shape(
        "<|tool_call>call:NAME{{ value(c.function.arguments) }}<tool_call|>",
        macros=_BRACES.replace("QUOTE", '<|"|>'),
        thought=("<|channel>thought\n", "\n<channel|>"),
    ),
    "function_gemma": Shape(
        "<start_function_call>call:NAME{{ value(c.function.arguments) }}<end_function_call>",
        macros=_BRACES.replace("QUOTE", "<escape>"),
    ),
    "pythonic": Shape(
        "NAME(PARAMS)",
        "KEY={{ v | tojson }}",
        begin="<|tool_call_start|>[",
        joint=", ",
        end="]<|tool_call_end|>",
        between_params=", ",
    ),
    "olmo3": Shape(
        "NAME(PARAMS)",
        "KEY={{ v | tojson }}",
        begin="<function_calls>\n",
        joint="\n",
        end="\n</function_calls>",
        between_params=", ",
    ),
    "llama4": Shape(
        "NAME(PARAMS)",
        "KEY={{ v | tojson }}",
        begin="[",
        joint=", ",
        end="]",
        between_params=", ",
        more="[func_name1(params_name1=params_value1)]",
    ),
    "llama3": Shape(
        '{"name": "NAME", "parameters": ARGS}', joint="; ", more='{"name": function name, "parameters": dictionary}'
    ),
    "granite3": Shape(
        _JSON, begin="<|tool_call|>[", joint=", ", end="]", more="<|start_of_role|>",
        answer=("<response>", "</response>"),
    ),
    "phi4_mini": Shape(_JSON, begin="<|tool_call|>[", joint=", ", end="]<|/tool_call|>", more="<|tool|><|/tool|>"),
    "hunyuan": Shape(
        _JSON, begin="<tool_calls>[", joint=", ", end="]</tool_calls>", thought=("<think>\n", "\n</think>\n"),
        answer=("<answer>\n", "\n</answer>"), more="<tool_calls>[",
    ),
    "nemotron2": Shape(_JSON, begin="<TOOLCALL>[", joint=", ", end="]</TOOLCALL>"),
    "cohere": Shape(
        '\n    {"tool_call_id": "INDEX", "tool_name": "NAME", "parameters": ARGS}',
        begin="<|START_ACTION|>[", joint=",", end="\n]<|END_ACTION|>",
        thought=("<|START_THINKING|>", "<|END_THINKING|>"), answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "muse_spark": Shape(
        '<atem:invoke name="NAME">\nPARAMS\n</atem:invoke>\n',
        '<atem:parameter name="KEY">VALUE</atem:parameter>',
        begin="<atem:function_calls>\n", end="</atem:function_calls>", between_params="\n",
    ),
    "minicpm5": Shape(
        '<function name="NAME">PARAMS</function>',
        '<param name="KEY">{{ "<![CDATA[" ~ v ~ "]]>" if v is string else v | tojson }}</param>',
        joint="\n",
    ),
    "harmony": Shape(
        "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGS<|call|>",
        thought=("<|start|>assistant<|channel|>analysis<|message|>", "<|end|>"),
        answer=("<|start|>assistant<|channel|>commentary<|message|>", "<|end|>"),
        more="<|channel|>analysis<|message|>",
    ),
}  # fmt: skip
