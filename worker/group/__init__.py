"""What a worker of several ranks does besides `ranks/`: every rank's engine takes the same turns.

`engine_lead.py` is rank 0's side: it sends the turns of its engine, and has files of adapters brought to every rank.
`engine_rank.py` is another rank's engine, `opening.py` how such a worker starts and ends.
"""
