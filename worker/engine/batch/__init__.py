"""The rows that decode together, and the prompts on their way into the batch.

Read in this order: `row.py` (one sequence), `running_batch.py` (one step of all of them), `row_model.py` (the model as
the batch calls it), `sampler.py` (one draw for all rows), `numbers.py` (what plain rows draw with, in arrays). What
edits the logits of single rows: `penalties.py`, `token_masks.py`, `grammar_masks.py`.

Prompts: `prompt_group.py` (fed together in one forward), `prefill_lane.py` (scored, embedded or shared prompts),
`network_run.py` (what networks read in their place), `prompts_in_flight.py` (the pieces under way), `keeping.py` (when
a row's KV goes into the prefix cache), `shared_prompts.py` (which rows store their beginning once). Where ranks hold a
model layer by layer, `parted_batch.py` (several batches that take turns).
`grammars.py`: compiled grammars and where a row stands in one. `stop_text.py`: stop strings across token borders.
`adapters.py` is the seam to adapters (worker/engine/adapter_slots.py).
"""
