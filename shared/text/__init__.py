"""Text and token ids, without transformers and without MLX.

`codec.py` first: tokenizer and chat template of one model. `chat_template.py` runs the template in a sandbox,
`grammar.py` checks and writes the grammars that a completion must follow. `languages/` has how each family of models
writes reasoning and tool calls.
"""
