"""How the models of a family write: which marks surround reasoning, and in which form they call tools.

A family is one entry of `FAMILIES`. Its chat template gives it away, or the tokens of its vocabulary where the template
does not write calls; a worker's `--tool-format` and `--reasoning-format` are above both (`language.py`). The forms of
calls are in `tool_forms.py`; `splitter.py` and `channels.py` take completions apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Thinking = Literal["", "open", "may"]  # how a completion begins: not with reasoning, inside it, or perhaps with it

MESSAGE = "<|message|>"  # Harmony's: a header ends, and its message begins
CHANNEL = "<|channel|>"
START = "<|start|>"
END = "<|end|>"

HERMES = "hermes"  # the form of calls that models are asked for whose template says nothing
NONE = "none"  # as a format: no reasoning


@dataclass(frozen=True)
class Reasoning:
    """Marks around reasoning, and around the answer that follows it."""

    name: str
    start: str
    end: str
    again: bool = False  # it may come after content, too
    channels: bool = False  # a completion is several messages, each on a channel
    tokens: tuple[str, ...] = ()  # tokens within the marks: decoding must not hide them
    answer: tuple[tuple[str, str], ...] = ()  # marks around the answer, which are not shown; usual ones first
    calls_after_answer: bool = False  # calls follow an answer that is closed, even an empty one
    closing: str = ""  # what ends reasoning that is cut off, so that an answer begins; "": its mark in lines of its own

    @property
    def closes(self) -> str:
        """Text that brings a model from inside its reasoning to where an answer or a call begins."""
        return self.closing or f"\n{self.end}\n\n"

    @property
    def hidden(self) -> tuple[str, ...]:
        """Marks around the answer, which are no part of it."""
        return tuple(mark for marks in self.answer for mark in marks if mark)

    def thinking_after(self, prompt: str) -> Thinking:
        """How a completion of this prompt begins: in reasoning, perhaps with reasoning, or without."""
        if self.channels:
            header, begun, said = prompt[prompt.rfind(START) + 1 :].partition(MESSAGE)
            return "may" if not begun or END in said else "open" if f"{CHANNEL}analysis" in header else ""
        written = prompt.rstrip()
        if written.endswith(self.start):
            return "open"
        return "" if written.endswith((self.end, *(mark for mark, _ in self.answer if mark))) else "may"


@dataclass(frozen=True)
class Family:
    """One family of models, and by what it is recognised."""

    name: str
    signs: tuple[tuple[str, ...], ...]  # its chat template has all the texts of one of these
    tokens: tuple[str, ...] = ()  # or its vocabulary has all of these, whatever the template
    calls: str = ""  # the form of its calls, by name; "": the family's own
    reasoning: str = ""  # its marks of reasoning, by name; "": the usual ones that template or vocabulary have, if any

    @property
    def form(self) -> str:
        """Name of the form of its calls."""
        return self.calls or self.name


@dataclass(frozen=True)
class Language:
    """The way in which one model writes."""

    family: str
    calls: str  # name of the form of its calls
    reasoning: Reasoning | None


_THINK = Reasoning("think", "<think>", "</think>")
REASONINGS: dict[str, Reasoning] = {
    each.name: each
    for each in (
        _THINK,
        Reasoning("longcat", "<longcat_think>", "</longcat_think>"),
        Reasoning("think_start", "<|think:start|>", "<|think:end|>"),
        Reasoning("mistral", "[THINK]", "[/THINK]"),
        Reasoning("minimax_m3", "<mm:think>", "</mm:think>"),
        Reasoning("seed_oss", "<seed:think>", "</seed:think>"),
        Reasoning(
            "cohere",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            answer=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
            closing="<|END_THINKING|>",
        ),
        Reasoning("granite", "<think>", "</think>", answer=(("<response>", "</response>"),)),
        Reasoning("hunyuan", "<think>", "</think>", answer=(("<answer>", "\n</answer>"), ("", "</answer>"))),
        Reasoning("hunyuan_opensource", "<think:opensource>", "</think:opensource>"),
        Reasoning(
            "gemma4", "<|channel>thought", "<channel|>", again=True, tokens=("<|channel>",), closing="\n<channel|>"
        ),
        Reasoning(
            "kimi_k3",
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
            tokens=("<|open|>", "<|close|>", "<|sep|>"),
            answer=(("<|open|>response<|sep|>", "<|close|>response<|sep|>"), ("", "<|close|>message<|sep|>")),
            calls_after_answer=True,
            closing="<|close|>think<|sep|>",
        ),
        Reasoning(
            "harmony",
            f"{CHANNEL}analysis{MESSAGE}",
            END,
            channels=True,
            tokens=(START, CHANNEL, MESSAGE, "<|constrain|>", "<|call|>", "<|return|>"),
            closing=f"{END}{START}assistant",
        ),
    )
}
_USUAL = ("think", "longcat", "think_start", "mistral")  # of families that share the form of their calls, but not these

# The first whose signs a template has is its family. Down to "hermes" in the order of
# `mlx_lm.tokenizer_utils._infer_tool_parser`, with families between that it does not know.
FAMILIES: tuple[Family, ...] = (
    Family("minimax_m3", (("]<]minimax[>[",),), reasoning="minimax_m3"),
    Family("minimax_m2", (("<minimax:tool_call>",),)),
    Family("gemma4", (("<|tool_call>", "<tool_call|>"),), reasoning="gemma4"),
    Family("function_gemma", (("<start_function_call>",),)),
    Family("longcat", (("<longcat_tool_call>",),)),
    Family("hy_v3_opensource", (("tool_sep", ":opensource"),), reasoning="hunyuan_opensource"),
    Family("hy_v4", (("tool_call", ":opensource"),), reasoning="hunyuan_opensource"),
    Family("hy_v3", (("<tool_sep>",),)),
    Family("glm47", (("<arg_key>",),)),
    Family("seed_oss", (("<seed:tool_call>",),), reasoning="seed_oss"),
    Family(
        "lfm2",
        (("<|tool_list_start|>",), ("<|tool_call_start|>",)),
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
        calls="pythonic",
    ),
    Family("qwen3_coder", (("<tool_call>\\n<function=",), ("<tool_call>\n<function=",))),
    Family(
        "kimi_k3",
        (("<|open|>", "<|close|>", "<|sep|>"),),
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        reasoning="kimi_k3",
    ),
    Family("kimi_k2", (("<|tool_calls_section_begin|>",),)),
    Family("minicpm5", (('<function name="', '<param name="'),)),
    Family("mistral", (("[TOOL_CALLS]",),)),
    Family("muse_spark", (("<atem:function_calls>",),)),
    Family("harmony", (("<|channel|>analysis<|message|>", "<|start|>assistant"),), reasoning="harmony"),
    Family("deepseek_v41", (("｜DSML｜ calls>",),)),
    Family("deepseek_v4", (("｜DSML｜", "tool_calls>"),)),
    Family("deepseek_v32", (("｜DSML｜",),), tokens=("｜DSML｜",)),
    Family("deepseek_v3", (("<｜tool▁sep｜>", "```json"),)),
    Family("deepseek_v31", (("<｜tool▁sep｜>",),), tokens=("<｜tool▁sep｜>",)),
    Family("cohere_values", (("<cofl:value",),), reasoning="cohere"),
    Family("cohere_xml", (("<cofl:tool_param",),), reasoning="cohere"),
    Family("cohere", (("<|START_ACTION|>",),), tokens=("<|START_ACTION|>", "<|END_ACTION|>"), reasoning="cohere"),
    Family("nemotron2", (("<TOOLCALL>",),)),
    Family("hunyuan", (("<tool_calls>[",),), reasoning="hunyuan"),
    Family("olmo3", (("<function_calls>",),)),
    Family("phi4_mini", (("<|tool|>", "<|/tool|>"), ("functools[",)), tokens=("<|tool_call|>", "<|/tool_call|>")),
    Family("hermes", (("<tool_call>",),)),
    Family("granite3", (("<|start_of_role|>",),), reasoning="granite"),
    Family("llama4", (("[func_name1(",),)),
    Family("llama3", (('{"name": function name, "parameters":',),)),
)
TOOL_FORMATS = tuple(sorted({family.form for family in FAMILIES}))
REASONING_FORMATS = (NONE, *sorted(REASONINGS))
_PLAIN = Family("", (), calls=HERMES)  # a template that says nothing: calls are asked for in Hermes' words
_BY_VOCABULARY = ("kimi_k3", "lfm2", "deepseek_v32", "deepseek_v31", "cohere", "phi4_mini")


def recognised(
    template: str, has: Callable[[str], bool] = lambda token: False, tool_format: str = "", reasoning_format: str = ""
) -> Language:
    """The language of models with this chat template and these tokens, where the formats do not say otherwise."""
    family = next((each for each in FAMILIES if any(all(sign in template for sign in s) for s in each.signs)), None)
    if family is None:
        known = (each for name in _BY_VOCABULARY for each in FAMILIES if each.name == name)
        family = next((each for each in known if all(map(has, each.tokens))), _PLAIN)
    if "harmony" in (tool_format, reasoning_format):  # the one goes with the other
        return Language("harmony", "harmony", REASONINGS["harmony"])
    usual = next((each for each in map(REASONINGS.__getitem__, _USUAL) if each.end in template), None) or next(
        (each for each in map(REASONINGS.__getitem__, _USUAL) if has(each.start) and has(each.end)), None
    )
    own = REASONINGS.get(family.reasoning)
    if own is not None and own.start == _THINK.start and usual is None:  # models of the family that do not reason
        own = None
    reasoning = None if reasoning_format == NONE else REASONINGS.get(reasoning_format) or own or usual
    return Language(family.name, tool_format or family.form, reasoning)
