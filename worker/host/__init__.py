"""The host: one process of a machine, which starts and ends a worker for each model that the machine is to hold.

process.py    looks at the ring's models and their demand, and acts. Read it first
held.py       a model in the hands of its host, from its lease until its memory is free
placement.py  decides which host loads which model, from facts that every host reads alike
workers.py    the worker processes: start, reports, end
spare.py      a worker process that waits for its model; the other end of `workers.py`
describe.py   a model as its host has to know it before it is loaded
offers.py     the models that this host could load: where their files are, and what is wrong with them
memory.py     the machine's memory, divided among models
"""
