"""Languages that models write, family by family, and how a completion is taken apart into reasoning, content and calls.

`families.py` first: each family is one entry there, by which `language.py` recognises a model's. `tool_forms.py` has
the forms of calls by name; what all have in common is `tool_form.py`. A kind of form is one class that reads calls and
writes their grammar: `json_calls.py`, `tagged_calls.py`, `value_calls.py`. They read a `growing_text.py` with
`mark_search.py` and `json_text.py`; `values.py` and `schemas.py` know the schemas of arguments.

`splitter.py` takes a completion apart, by the plan and into the pieces of `pieces.py`; `channels.py` does so for
families that write several messages. `grammars.py` has the grammar of a whole completion, and `reasoning_count.py`
counts the tokens of reasoning.
"""
