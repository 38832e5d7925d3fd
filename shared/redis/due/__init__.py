"""Work that is due from some time on, by one process at a time: `due_list.py` has the list, `webhooks.py` the entries
of webhooks in one.
"""
