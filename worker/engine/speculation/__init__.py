"""Several tokens of a row in one forward: guessed from what is known, and kept as far as the model draws the same.

Read in this order: `batch.py` (a step that checks drafts), `part.py` (one row's part of it), `unread.py` (such a step
before it has been read), `drafting.py` (which rows get a draft, and how long), `source.py` (what is known of one row,
and what its next draft says), `model_drafts.py` (when a draft model drafts, and for whom), `draft_batch.py` (the rows
that it reads along with), then what is pure: `lookup.py` (where a text has gone on before from the same words),
`alignment.py` (where a row is in a text that it goes along with, though not word by word), `memory.py` (what
sequences of the same prompt have written), `payoff.py` (whether a wider step pays, by what steps have taken and what
was accepted), `silence.py` (when rows are asked again that had nothing to say), `draft_times.py` (whether a draft
model's drafts pay for its own forwards).
"""
