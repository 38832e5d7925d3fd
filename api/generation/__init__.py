"""From a checked request to sequences in the queue, and from their token events to what a reply says.

This room knows nothing of one endpoint's JSON: chat, completions, batches and the routes for training code share it.

The way in: `target.py` (which model and adapter) -> `plan.py` (the plan of the reply and the work together; it asks
`sampling.py`, which has the fields of a request and the sampling parameters, and `structured.py`, the grammar) ->
`work.py` (the work as sequence specs) -> `running.py` (enqueue, read, cancel).

The way out: `choice.py` (token events to new text) with `languages/` (reasoning, content, tool calls, as each family
of models writes them), and `logprobs.py`. `api/http/sse.py` sends the bytes.

For some requests only: `resume.py` (streams that outlive their connection), `collection.py` (live traffic that is
trained on), `continuations.py` (log-probabilities of given texts), `heads.py` (what heads say of texts),
`networks.py` (what networks make of tensors), `tracing.py` (spans).
"""
