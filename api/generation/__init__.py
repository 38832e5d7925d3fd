"""From a checked request to sequences in the queue, and from their token events to what a reply says.

This room knows nothing of one endpoint's JSON: chat, completions, batches and the routes for training code share it.

The way in: `target.py` (which model and adapter) -> `plan.py` (the plan of the request; `sampling.py` has the fields
of its body and the sampling parameters, `structured.py` the grammar) -> `sequences.py` (one template for all of its
completions) -> `running.py` (enqueue, read, cancel).

The way out: `choice.py` (token events to new text) with `shared/text/languages/` (reasoning, content, tool calls, as
each family of models writes them), `free_text.py` (calls whose argument is free text), and `logprobs.py`.
`api/http/sse.py` sends the bytes.

For some requests only: `named_images.py` (images that a request names), `resume.py` (streams that outlive their
connection), `collection.py` (live traffic that is trained on), `continuations.py` (log-probabilities of given texts),
`heads.py` (outputs of heads for texts), `networks.py` (outputs of networks for tensors), `tracing.py` (spans).
"""
