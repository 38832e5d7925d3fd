"""Files and batches: `file_store.py` keeps bytes, `batch_store.py` what becomes of a batch."""
