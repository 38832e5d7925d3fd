"""Facts about the machine that a process of ours runs on, read from its system; no MLX, no Redis.

One noun a file: `memory.py` (total, available, pressure, a process's footprint), `power.py` (mains or battery),
`thermal.py` (how hot), `system.py` (architecture, Rosetta, macOS version, chip), `network.py` (own addresses, which of
another machine's to try, macOS's privacy), `commands.py` (macOS's small programs); `status.py` is what a heartbeat says
of it all, `awake.py` keeps it from sleeping. `linux.py` and `darwin.py` have what only one system has. Every parser is
a plain function of text, so it is tested on samples of either system. What cannot be read is `unknown`, never an error.
"""
