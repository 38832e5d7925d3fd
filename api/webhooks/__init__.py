"""Webhooks: a signed message to a server that is notified of the end of a job, a batch or a response.

`body.py` is what a request says and whether it may, `work.py` sends what is due, `sending.py` one message.
"""
