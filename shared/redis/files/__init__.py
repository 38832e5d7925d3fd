"""Files and batches: `file_store.py` stores bytes, `batch_store.py` the progress of a batch."""
