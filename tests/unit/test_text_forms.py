"""Grammars of custom tools as regular expressions, and what a model that is held to one can write."""

import json
import re

import pytest

from api.openai.responses.tools import CustomTool, offered
from api.openai.text_forms import MAX_DEPTH, MAX_REGEX, regex_of
from shared.text import grammar
from tests.unit.api_texts import bundle, codec

PATCHES = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

// what there is to do
hunk: delete_hunk | update_hunk
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change?

filename: /(.+)/

change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
GOOD = '*** Begin Patch\n*** Update File: a.py\n@@ def f\n-x = "\\n"\n+y\t= 2\n*** Delete File: ü.py\n*** End Patch'


def test_a_grammar_without_recursion_is_one_regular_expression() -> None:
    regex = regex_of("lark", PATCHES)
    assert re.fullmatch(regex, GOOD)
    for wrong in (GOOD[1:], GOOD + "x", GOOD.replace("Update", "Change"), GOOD.replace("+y", "y")):
        assert not re.fullmatch(regex, wrong)
    mixed = 'start: ("a"i | WORD) ["-" /[0-9]/~] \n%import common.WORD'
    assert regex_of("lark", mixed) == "", "what is not known is not guessed at"
    assert re.fullmatch(regex_of("lark", 'start: "a"i{2} ["-" /[0-9]\\//]'), "aA-7/")
    assert regex_of("regex", "[ab]+") == "[ab]+"


@pytest.mark.parametrize(
    "definition",
    [
        'start: "(" start ")" | "x"',
        "start: missing",
        "begin: /x/",
        "start: /x/\n%ignore /y/",
        "start: (/x/",
        "start: /x/)",
        "start: /" + "x" * MAX_REGEX + "/",
        "start: a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(30)) + "a30: /x/",
        "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(MAX_DEPTH + 5)) + f"a{MAX_DEPTH + 5}: /x/",
    ],
)
def test_what_is_not_regular_or_too_large_has_no_regular_expression(definition: str) -> None:
    assert regex_of("lark", definition) == ""


def test_a_call_s_text_is_held_to_the_grammar_inside_its_json() -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": PATCHES}
    tool = CustomTool.model_validate({"type": "custom", "name": "apply_patch", "format": form})
    (shown,) = offered([tool])
    assert shown.function.strict and "pattern" not in json.dumps(shown.function.parameters), "the model sees no regex"
    text = grammar.of_schema(grammar.enforceable(shown.function.enforced)[0])

    def is_written(arguments: str) -> bool:
        matcher = grammar.matcher_of(text, grammar.tokenizer_of(bundle(), codec().vocab_size))
        ids = codec().encode(arguments)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert is_written(json.dumps({"input": GOOD}, ensure_ascii=False))
    assert not is_written(json.dumps({"input": GOOD[1:]}, ensure_ascii=False))
