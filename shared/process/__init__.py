"""What every process of ours needs besides its work.

Start: `settings.py` (flags, environment, YAML) with one file for the settings of each process (`worker_settings.py`,
`api_settings.py`, ...), `nested_config.py` (files in sections), `foreign_flags.py` (flags of other servers, refused
with a reason), `discovery.py` with `ring_query.py` (the ring to join), `logs.py`, `garbage.py`, `open_files.py` (how
many it may have).
Life: `loops.py` (what goes on as long as the process does). End: `lifeline.py` (leave with the parent). Asking others:
`patience.py` (HTTP retries), `call_process.py` and `call_pipe.py` (code in a process that can be killed: our end and
its end). Folders that are there whole or not at all: `whole_folder.py`.
"""
