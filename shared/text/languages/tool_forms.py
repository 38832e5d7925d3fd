"""The forms of calls by name. Which family writes which stands in `families.py`."""

from shared.text.grammar import BREAK, DIGITS
from shared.text.languages.families import CHANNEL, HERMES
from shared.text.languages.growing_text import BLANKS
from shared.text.languages.json_calls import JsonCalls, NamedCalls
from shared.text.languages.tagged_calls import NestedCalls, Tag, TaggedCalls, TypedCalls
from shared.text.languages.tool_form import ToolForm
from shared.text.languages.value_calls import BracedCalls, PythonCalls

_LIST = BLANKS + "[],"
_OPEN = ":opensource"  # at the end of names in Hunyuan's marks
_COHERE = (("string", "raw"), ("number", "json"), ("object", "dict"), ("array", "list"))
_SPACE = "]<]minimax[>["  # of MiniMax M3's marks

_FORMS: tuple[ToolForm, ...] = (
    # Objects with a name and arguments
    JsonCalls(
        HERMES, (("<tool_call>", "</tool_call>"),), between=_LIST, head="\n", foot="\n", joint="\n"
    ),
    JsonCalls(
        "llama3",
        opens=("{",),
        between=BLANKS + ";",
        joint="; ",
        hidden=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
        arguments_key="parameters",
    ),
    JsonCalls(
        "granite3", (("<|tool_call|>", ""), ("<tool_call>", "</tool_call>")), many=True, between=_LIST,
        head="[", joint=", ", foot="]",
    ),
    JsonCalls(
        "phi4_mini", (("<|tool_call|>", "<|/tool_call|>"), ("functools", "")), many=True, between=_LIST,
        head="[", joint=", ", foot="]",
    ),
    JsonCalls(
        "hunyuan", (("<tool_calls>", "</tool_calls>"),), many=True, between=_LIST, head="[", joint=", ", foot="]",
    ),
    JsonCalls(
        "nemotron2", (("<TOOLCALL>", "</TOOLCALL>"),), many=True, between=_LIST, head="[", joint=", ", foot="]",
    ),
    JsonCalls(
        "cohere", (("<|START_ACTION|>", "<|END_ACTION|>"),), many=True, between=_LIST,
        head="[\n    ", joint=",\n    ", foot="\n]",
        lead=f'"tool_call_id": "{DIGITS}", ', name_key="tool_name", arguments_key="parameters",
    ),
    # A name, and arguments in JSON
    NamedCalls(
        "mistral", (("[TOOL_CALLS]", ""),), many=True, between=BLANKS + ",]", joint="[TOOL_CALLS]",
        tokens=("[ARGS]", "[CALL_ID]"), after="[ARGS]", suffix=r"\[CALL_ID\]\s*\w+$", lists=True,
    ),
    NamedCalls(
        "kimi_k2", (("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),), many=True,
        tokens=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        before="<|tool_call_begin|>", prefix="functions.", suffix=r":\d+$", written_suffix=f":{DIGITS}",
        after="<|tool_call_argument_begin|>", tail="<|tool_call_end|>",
    ),
    NamedCalls(
        "deepseek_v3", (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),), many=True, joint="\n",
        tokens=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>", after="\n```json\n", tail="\n```<｜tool▁call▁end｜>",
    ),
    NamedCalls(
        "deepseek_v31", (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),), many=True,
        tokens=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        before="<｜tool▁call▁begin｜>", after="<｜tool▁sep｜>", tail="<｜tool▁call▁end｜>",
    ),
    # Each argument between marks
    TaggedCalls(
        "qwen3_coder", (("<tool_call>", "</tool_call>"),), bare=("<function=",), head="\n", foot="\n", joint="\n",
        call=Tag("<function=", ">"), argument=Tag("<parameter=", ">"), closing="</parameter>", tail="</function>",
        lines=True, after_call="\n", after_argument="\n",
    ),
    TaggedCalls(
        "seed_oss", (("<seed:tool_call>", "</seed:tool_call>"),), head="\n", foot="\n", joint="\n",
        call=Tag("<function=", ">"), argument=Tag("<parameter=", ">"), closing="</parameter>", tail="</function>",
        after_call="\n", after_argument="\n",
    ),
    TaggedCalls(
        "glm47", (("<tool_call>", "</tool_call>"),), joint="\n",
        tokens=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        argument=Tag("<arg_key>", "</arg_key>"), opening=f"{BREAK}<arg_value>", closing="</arg_value>",
        after_call=BREAK, after_argument=BREAK,
    ),
    TaggedCalls(
        "longcat", (("<longcat_tool_call>", "</longcat_tool_call>"),), joint="\n",
        tokens=("<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"),
        argument=Tag("<longcat_arg_key>", "</longcat_arg_key>"), opening=f"{BREAK}<longcat_arg_value>",
        closing="</longcat_arg_value>", after_call=BREAK, after_argument=BREAK,
    ),
    TaggedCalls(
        "minimax_m2", (("<minimax:tool_call>", "</minimax:tool_call>"),), many=True, head="\n", foot="\n", joint="\n",
        call=Tag('<invoke name="', ">", '"'), argument=Tag('<parameter name="', ">", '"'), closing="</parameter>",
        tail="</invoke>", after_call="\n", after_argument="\n",
    ),
    NestedCalls(
        "minimax_m3", ((f"{_SPACE}<tool_call>", f"{_SPACE}</tool_call>"),), many=True, head="\n", foot="\n", joint="\n",
        tokens=(_SPACE,), call=Tag(f'{_SPACE}<invoke name="', ">", '"'), argument=Tag(f"{_SPACE}<", ">"),
        closing=_SPACE + "</{name}>", tail=f"{_SPACE}</invoke>",
    ),
    *(
        TaggedCalls(
            name, ((f"<｜DSML｜{calls}>", f"</｜DSML｜{calls}>"),), many=True, head="\n", foot="\n", joint="\n",
            tokens=("｜DSML｜",), call=Tag('<｜DSML｜invoke name="', ">", '"'),
            argument=Tag('<｜DSML｜parameter name="', ">", '"', ' string="{string}"'), closing="</｜DSML｜parameter>",
            tail="</｜DSML｜invoke>", after_call="\n", after_argument="\n",
        )
        for name, calls in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    ),
    TaggedCalls(
        "deepseek_v41", (("<｜DSML｜ calls>", "</｜DSML｜ calls>"),), many=True, head="\n", foot="\n", joint="\n",
        tokens=("｜DSML｜",), call=Tag('<｜DSML｜ invoke name="', ">", '"'),
        argument=Tag('<｜DSML｜ parameter name="', ">", '"', ' string="{string}"'), closing="</｜DSML｜ parameter>",
        tail="</｜DSML｜ invoke>", after_call="\n", after_argument="\n",
    ),
    *(
        TaggedCalls(
            name, ((f"<tool_calls{of}>", f"</tool_calls{of}>"),), many=True, head="\n", foot="\n", joint="\n",
            tokens=(
                f"<tool_call{of}>", f"</tool_call{of}>", *([separator] if separator else []),
                f"<arg_key{of}>", f"</arg_key{of}>", f"<arg_value{of}>", f"</arg_value{of}>",
            ),
            call=Tag(f"<tool_call{of}>", separator), argument=Tag(f"<arg_key{of}>", f"</arg_key{of}>"),
            opening=f"{BREAK}<arg_value{of}>", closing=f"</arg_value{of}>", tail=f"</tool_call{of}>",
            after_call=BREAK, after_argument=BREAK,
        )
        for name, of, separator in (
            ("hy_v3", "", "<tool_sep>"), ("hy_v3_opensource", _OPEN, f"<tool_sep{_OPEN}>"), ("hy_v4", _OPEN, ""),
        )
    ),
    TaggedCalls(
        "cohere_xml", (("<cofl:tool_calls>", "</cofl:tool_calls>"),), many=True,
        call=Tag("<cofl:tool_call ", ">", '"', key="name", lead=f'id="{DIGITS}" '),
        argument=Tag("<cofl:tool_param ", ">", '"', ' string="{string}"', key="name"), closing="</cofl:tool_param>",
        tail="</cofl:tool_call>",
    ),
    TypedCalls(
        "cohere_values", (("<cofl:tool_calls>", "</cofl:tool_calls>"),), many=True,
        call=Tag("<cofl:tool_call ", ">", '"', key="name", lead=f'id="{DIGITS}" '),
        argument=Tag("<cofl:value ", ">", '"', ' type="{type}"', key="name", types=_COHERE), closing="</cofl:value>",
        tail="</cofl:tool_call>",
    ),
    TaggedCalls(
        "muse_spark", (("<atem:function_calls>", "</atem:function_calls>"),), many=True, head="\n", foot="\n",
        joint="\n", call=Tag('<atem:invoke name="', ">", '"'), argument=Tag('<atem:parameter name="', ">", '"'),
        closing="</atem:parameter>", tail="</atem:invoke>", after_call="\n", after_argument="\n",
    ),
    TaggedCalls(
        "minicpm5", (), bare=("<function name=",), joint="\n", call=Tag('<function name="', ">", '"'),
        argument=Tag('<param name="', ">", '"'), closing="</param>", tail="</function>",
    ),
    TaggedCalls(
        "kimi_k3", (("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),), many=True,
        tokens=("<|open|>", "<|close|>", "<|sep|>"),
        call=Tag('<|open|>call tool="', "<|sep|>", '"', f' index="{DIGITS}"'),
        argument=Tag('<|open|>argument key="', "<|sep|>", '"', ' type="{type}"'), closing="<|close|>argument<|sep|>",
        tail="<|close|>call<|sep|>",
    ),
    # Values in a syntax of their own
    BracedCalls("gemma4", (("<|tool_call>", "<tool_call|>"),), tokens=('<|"|>',), quote='<|"|>'),
    BracedCalls(
        "function_gemma", (("<start_function_call>", "<end_function_call>"),), tokens=("<escape>",), quote="<escape>"
    ),
    PythonCalls(
        "pythonic", (("<|tool_call_start|>", "<|tool_call_end|>"),), many=True, between=_LIST,
        head="[", joint=", ", foot="]",
    ),
    PythonCalls(
        "olmo3", (("<function_calls>", "</function_calls>"),), many=True, between=_LIST,
        head="\n", joint="\n", foot="\n",
    ),
    PythonCalls(
        "llama4", opens=("[",), many=True, between=_LIST, joint=", ", head="[", foot="]",
        hidden=("<|python_start|>", "<|python_end|>"),
    ),
    # Messages on channels are read by `channels.py`
    NamedCalls(
        "harmony", before=f"{CHANNEL}commentary to=functions.", after=" <|constrain|>json<|message|>",
        tokens=(CHANNEL, "<|constrain|>", "<|message|>"),
    ),
)  # fmt: skip
FORMS = {form.name: form for form in _FORMS}


def form_of(name: str) -> ToolForm:
    """A form by its name; Hermes' for one that there is not (a plan of another version of the program)."""
    return FORMS.get(name, FORMS[HERMES])
