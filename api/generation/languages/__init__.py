"""Languages that models write, family by family, and how a completion is taken apart into reasoning, content and calls.

`families.py` first: each family is one entry there, which its chat template gives away. `tool_formats.py` reads the
text of a call. `splitter.py` takes a completion apart, by the plan and into the pieces of `pieces.py`; a forced call
that still grows is read by `growing_call.py`. `channels.py` does so for families that write several messages.
`reasoning_count.py` counts the tokens of reasoning; `mark_search.py` finds marks in a text that grows.
"""
