"""Parts that every process of ours needs besides its work.

Settings: `settings.py` reads flags, environment and YAML. Each process has a file of its own: `worker_settings.py`,
`api_settings.py`, `serve_settings.py`; `process_settings.py` has what all share, and a job runner's,
`group_settings.py` the ranks that hold one model together, `machine_settings.py` those of the machine,
`host_settings.py` those of a process that serves several models.
`model_aliases.py` and `other_rings.py` say what two of an api's settings mean. `nested_config.py` reads files in
sections, `foreign_flags.py` refuses flags of other servers, `panels.py` shows a `--help` in panels.

Start: `ring_query.py` (the ring to join), `logs.py`, `garbage.py`, `open_files.py` (how many it may
have).
`start_reports.py` tells the parent how far it is.
Life: `loops.py` (what goes on as long as the process does). End: `lifeline.py` (leave with the parent). Asking others:
`patience.py` (HTTP retries), `call_process.py` and `call_pipe.py` (code in a process that can be killed: our end and
its end). Folders that are there whole or not at all: `whole_folder.py`.
"""
