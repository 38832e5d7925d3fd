"""Several tokens of a row in one forward: guessed from what is known, and kept as far as the model draws the same.

Read in this order: `batch.py` (a step that checks drafts), `part.py` (one row's part of it, and such a step before it
has been read), `drafting.py` (which rows get a draft, and how long), `payoff.py` (the rule by which drafts pay, the
table of what steps take, the account of what was lost), `source.py` (the texts of one row, and its next draft by them),
`model_drafts.py` (when a draft model drafts, and for whom), `draft_batch.py` (the rows that it reads along with); then
what is pure: `lookup.py` (where a text has gone on before from the same words), `alignment.py` (where a row is in a
text that it goes along with, though not word by word), `memory.py` (completions of the same prompt).
"""
