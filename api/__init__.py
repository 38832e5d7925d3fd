"""The HTTP front end, the command-line client, and the supervisor of one machine's processes.

    __main__.py   one api process under uvicorn
    app.py        `create_app`: routes, guards and the ring put together; every router is in its list ROUTED
    tenants.py    who may see what; one rule for every route
    admission.py  which requests may begin work now: rates and requests under way
    load.py       what is under way in this process, and which queues are full

A request comes in through `http/` (keys, limits, errors), is read by a room of routes (`openai/`, `anthropic/`,
`rl/`, `jobs/`, `batches/`, `adapters/`, `training/`, `ops/`), and becomes sequences in `generation/`, which talks to
Redis through `ring/`. `callers/` shares this process between the keys that ask, `checks/` tries what clients send where
it can be killed, and `webhooks/` notify other servers when a job, batch or response has ended. The api computes nothing
with a model and imports no MLX.

Besides: `serve/` starts every process of a machine, `cli/` is the client, `demo/` is what `make demo` runs.
"""
