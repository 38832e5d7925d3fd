"""What is to be done from some time on, by one process at a time: `due_list.py`."""
