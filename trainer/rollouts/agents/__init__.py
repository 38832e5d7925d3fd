"""Agents as environments: any program that asks a model by OpenAI's chat endpoint, at the `base_url` that it is given.

`environment.py` first: the program becomes an environment whose prompts are what it asks and whose rewards are what it
came to. `endpoint.py` is the endpoint that it asks, `runs.py` one run of a program, and `program.py` the programs,
started for each episode or once for all. `others.py` names the environments of others; `verifiers_program.py`,
`openenv_program.py` and `mcp_program.py` are the programs that play them; they run in a Python of their own, and import
nothing of ParaLLM.
"""
