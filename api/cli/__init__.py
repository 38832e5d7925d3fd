"""The client on the command line, `mlx_parallm`. It speaks HTTP only and loads neither FastAPI nor MLX.

`main.py` has the commands that submit, poll and list jobs, and gathers those of the other files, one file a noun:
`chat.py`, `models.py`, `adapters.py`, `batches.py`, `deadletters.py`, `replay.py`, `bench.py`, and `top.py`, which
shows `ring_screen.py`. `key.py`, `acl.py`, `doctor.py` and `convert.py` need no server. `launch.py` starts coding
agents, with the configurations of `agents.py`; `mcp_server.py` gives agents the ring's own things as tools. A command
loads what no other one needs, such as a server's settings, when it is asked for.

Below them: `client.py` is the client as a Python class, `batch_client.py` its part for files and batches, `http.py` how
both read answers and refusals, `console.py` how all commands print.
"""
