"""The routes of jobs, /v1/jobs: submit, poll, read results, cancel, delete.

`routes.py` has the endpoints, `body.py` the body of a submission and the lines of an upload. A job runner
(`worker/jobs/`) does the work.
"""
