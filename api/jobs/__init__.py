"""Jobs over HTTP: submit, poll, read results, cancel, delete. A job runner (`worker/jobs/`) does the work.

`routes.py` has the endpoints, `stream.py` the one that sends results as they finish, `body.py` the body of a submission
and the lines of an upload, `images.py` the images of prompts.
"""
