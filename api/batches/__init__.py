"""OpenAI's batches: a file of requests in, a file of answers out; a job does the work between them.

Read in this order: `batch_routes.py` and `file_routes.py`, the endpoints; `work.py`, what api processes do for a batch
before and after its job; `lines.py`, from one line of the file to a job's input and from a result to the answer's line,
which `shapes.py` writes. `uploads.py` reads the form of a file, `anthropic_files.py` shows files to clients of
Anthropic's, and `message_routes.py` are its Message Batches, whose requests come in one body and become such a file.
"""
