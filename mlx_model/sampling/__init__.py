"""Rules for the next token of a row, apart from the batch.

`draw.py`: the draw itself, plain functions on arrays. `named_tokens.py`: log-probabilities of tokens that a row names.
`prompt_tokens.py`: other tokens in the places of a prompt's own, named or drawn.
"""
