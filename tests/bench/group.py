"""One rank against several that hold the model together: `python -m tests.bench.group`.

Random weights, made on the device; one process a rank, which take their turns as those of a worker do: rank 0 sends
orders and facts over a `TurnsOut`, the others obey them. Without Redis and without text. Of each shape, by ranks: a
prompt's time to its first token, tokens a second of 1, 8 and 32 rows, the same of 32 rows over eight adapters of rank
16. Of a step at rank 0: what its thread works and does not wait, what giving operations out takes (waits for the device
among it), what sending the turn takes. The last lines are the ratios to one rank.

On CUDA the shapes 8B and 32B in bfloat16 over NCCL, one GPU a rank; elsewhere a small one in fp32 over the ring.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.group_step import PROMPT, SHAPES, group_of, handing_over, random_model

ROWS = (1, 8, 32)
ADAPTERS, RANK = 8, 16
ADAPTED = ("self_attn.q_proj", "self_attn.v_proj")
WARM, STEPS, ROUNDS = 12, 36, 3
TOKENS = 256  # of a row, more than it decodes: a row whose KV has no room would wait, and all others with it
KEY = b"ranks of one bench"


def main() -> None:
    """All shapes, with one rank and with several."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), help="default: 8B 32B with CUDA, else small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt that is timed; 0: none is")
    parser.add_argument("--seconds", type=float, default=220.0, help="no case is begun after these")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        _as_rank(**json.loads(args.rank))
        sys.stdout.flush()
        os._exit(0)  # NCCL may wait for the others
    until, told = time.monotonic() + args.seconds, {}
    for shape in args.shapes or (["8B", "32B"] if _has_cuda() else ["small"]):
        figures = {ranks: _case(shape, ranks, args.prompt, until) for ranks in {1, args.ranks}}
        told[shape] = figures
        _print_ratios(shape, figures[1], figures[args.ranks], args.ranks)
        if args.json:
            args.json.write_text(json.dumps(told, indent=1))


def _has_cuda() -> bool:
    found = "import mlx.core as mx; print(mx.cuda.is_available())"  # in a process of its own, which takes no GPU
    return subprocess.run([sys.executable, "-c", found], capture_output=True, text=True).stdout.strip() == "True"


def _print_ratios(shape: str, one: dict[str, float], several: dict[str, float], ranks: int) -> None:
    for name in one:
        if name in several and one[name] and not name.startswith(("memory", "made", "sending")):
            is_time = name.endswith("ms")  # so that more is better
            ratio = one[name] / several[name] if is_time else several[name] / one[name]
            print(f"{shape:5} {ranks} ranks over 1: {name:34} {ratio:5.2f}", flush=True)


def _case(shape: str, ranks: int, prompt: int, until: float) -> dict[str, float]:
    """What one start of so many processes has measured; {}: it failed, or there was no time."""
    left = until - time.monotonic()
    if left <= 0:
        print(f"{shape:5} {ranks} ranks: not begun, the time is up", flush=True)
        return {}
    with tempfile.TemporaryDirectory() as folder:
        processes = [_started(shape, rank, ranks, prompt, Path(folder)) for rank in range(ranks)]
        figures: dict[str, float] = {}
        try:
            out, _ = processes[0].communicate(timeout=left + 20)
        except subprocess.TimeoutExpired:
            processes[0].kill()
            out = processes[0].communicate()[0] + "took too long\n"
        for process in processes:
            process.kill()
            process.wait()
    for line in out.splitlines():
        name, _, value = line.partition(" = ")
        if value:
            figures[name] = float(value)
            print(f"{shape:5} {ranks} ranks: {name:34} {float(value):10.2f}", flush=True)
        else:
            print(f"{shape:5} {ranks} ranks: {line}", flush=True)
    return figures


def _started(shape: str, rank: int, ranks: int, prompt: int, folder: Path) -> subprocess.Popen[str]:
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
            ports = [one.getsockname()[1], other.getsockname()[1]]
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
        (folder / "hosts.json").write_text(json.dumps([[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]))
        for each in sockets:
            each.close()
        (folder / "ports.json").write_text(json.dumps(ports))
    ports = json.loads((folder / "ports.json").read_text())
    group = {"MLX_RANK": str(rank), "MLX_WORLD_SIZE": str(ranks), "MLX_HOSTFILE": str(folder / "hosts.json")}
    group |= {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(ports[0]), "NCCL_NVLS_ENABLE": "0"}
    environment = {**os.environ, **(group if ranks > 1 else {})}
    shown = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    environment["CUDA_VISIBLE_DEVICES"] = shown[rank] if rank < len(shown) else str(rank)
    asked = {"shape": shape, "rank": rank, "ranks": ranks, "prompt": prompt, "port": ports[1], "folder": str(folder)}
    command = [sys.executable, "-m", "tests.bench.group", "--rank", json.dumps(asked)]
    out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, stdout=out, text=True)


# -- one rank


def _as_rank(shape: str, rank: int, ranks: int, prompt: int, port: int, folder: str) -> None:
    from mlx_model import fast_blas

    fast_blas.install()

    import mlx.core as mx
    from mlx_lm.generate import generation_stream

    group = group_of(ranks)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as own, mx.stream(generation_stream):
        loaded = random_model(shape, group, Path(own))
        if rank == 0:
            print(f"made, s = {time.perf_counter() - began}")
            print(f"memory, GiB = {mx.get_active_memory() / 2**30}", flush=True)
        turns = Turns(loaded, rank, ranks, port)
        if rank:
            turns.follow()
        else:
            measure(turns, Path(folder), prompt)


@dataclass
class Made:
    """An adapter version, on disk."""

    path: Path
    manifest: Any


def adapters(modules: dict[str, tuple[int, int]], folder: Path) -> list[Made]:
    """Random ones of the whole model."""
    import mlx.core as mx

    from shared.adapters import AdapterManifest

    made = []
    for number in range(ADAPTERS):
        mx.random.seed(number)
        tensors = {}
        for path, (inputs, outputs) in modules.items():
            tensors[f"{path}.lora_a"] = (mx.random.normal((inputs, RANK)) * 0.02).astype(mx.float16)
            tensors[f"{path}.lora_b"] = (mx.random.normal((RANK, outputs)) * 0.02).astype(mx.float16)
        file = folder / f"adapter{number}.safetensors"
        mx.save_safetensors(str(file), tensors)
        size, name = file.stat().st_size, f"a{number}"
        manifest = AdapterManifest(name, 1, "lora", RANK, 2.0, tuple(modules), "", 0, "", size, 1 << 20, 0)
        made.append(Made(file, manifest))
    return made


class Turns:
    """An engine that takes its turns with the others', as rank 0 or behind it."""

    def __init__(self, loaded: Any, rank: int, ranks: int, port: int) -> None:
        from mlx_model.config import EngineConfig, SlotConfig
        from ranks.channel import TurnsIn, TurnsOut
        from worker.engine.adapter_slots import AdapterSlots
        from worker.engine.engine import Engine
        from worker.engine.orders import EngineParts
        from worker.engine.turns import Consent
        from worker.engine.warm_up import WarmUp

        self.loaded, self._ranks, self._rank = loaded, ranks, rank
        config = EngineConfig("", max_rows=max(ROWS), prefill_rows=64, prefill_chunk=8192, prefix_cache_bytes=0)
        self.slots = AdapterSlots(loaded, SlotConfig(ADAPTERS, 2 * RANK), lambda: None)
        self.engine = Engine(loaded, config, self.slots)
        self.parts = EngineParts(loaded, self.engine, self.slots, WarmUp(loaded, config, self.engine, self.slots))
        self._consent, self._number = Consent(ranks), 0
        self.sending_s = 0.0
        self._followers: list[tuple[socket.socket, TurnsOut]] = []
        if rank == 0 and ranks > 1:
            with socket.create_server(("127.0.0.1", port)) as listening:
                for _ in range(1, ranks):
                    sock = listening.accept()[0]
                    self._followers.append((sock, TurnsOut(sock, KEY)))
        elif rank:
            self._lead = _connected(port)
            self._turns = TurnsIn(self._lead, KEY)

    def take(self, *orders: Any) -> Any:
        """One turn of all ranks; its events."""
        import msgspec

        from worker.group.engine_lead import engine_turn

        facts = None
        if self._ranks > 1:
            seen = self.engine.seen()
            self._consent.hear(0, seen.read, seen.unreadable)
            self._hear()
            facts = self._consent.facts(seen)
            self._number += 1
            began = time.perf_counter()
            data = msgspec.msgpack.encode(engine_turn(self._number, facts, orders))
            for _, each in self._followers:
                each.send(data)
            self.sending_s += time.perf_counter() - began
        for order in orders:
            order.carry_out(self.parts)
        return self.engine.turn(facts).events

    def _hear(self) -> None:
        """What others have read."""
        for at, (sock, _) in enumerate(self._followers, 1):
            while line := _waiting_line(sock):
                self._consent.hear(at, [line], [])

    def follow(self) -> None:
        """Until rank 0 has gone."""
        from ranks.channel import ChannelError

        try:
            while True:
                turn = self._turns.next()
                seen = self.engine.seen()
                for version in seen.read:
                    self._lead.sendall(f"{version}\n".encode())
                for order in turn.orders:
                    order.carry_out(self.parts)
                self.engine.turn(turn.facts)
        except ChannelError:
            return


def _connected(port: int) -> socket.socket:
    until = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _waiting_line(sock: socket.socket) -> str:
    """The next line, if one has come whole; "" else."""
    try:
        peeked = sock.recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return ""
    line, end, _ = peeked.partition(b"\n")
    return sock.recv(len(line) + 1).decode().strip() if end else ""


def measure(turns: Turns, folder: Path, prompt: int) -> None:
    """Rank 0's: print a line a figure."""
    from mlx_model.sites import module_shapes

    if prompt:
        print(f"prompt of {prompt}, ms = {prompt_ms(turns, prompt)}", flush=True)
    for count in ROWS:
        turns.sending_s = 0.0
        step_s, worked_s, handed_s, steps = _step_s(turns, ["" for _ in range(count)])
        print(f"tok/s of {count} rows = {count / step_s}", flush=True)
        print(f"thread works at {count} rows, ms = {worked_s * 1000}", flush=True)
        print(f"handing over at {count} rows, ms = {handed_s * 1000}", flush=True)
        if turns._ranks > 1:
            print(f"sending turns of {count} rows, us = {turns.sending_s / steps * 1e6}", flush=True)
    loaded = turns.loaded
    whole = module_shapes(loaded.model) if loaded.whole is None else loaded.whole.shapes
    names = [path for path in whole if path.endswith(ADAPTED)]
    versions = _load(turns, adapters({path: whole[path] for path in names}, folder))
    count = max(ROWS)
    step_s, worked_s, handed_s, _ = _step_s(turns, [versions[at % ADAPTERS] for at in range(count)])
    print(f"tok/s of {count} rows, {ADAPTERS} adapters = {count / step_s}", flush=True)
    print(f"thread works with adapters, ms = {worked_s * 1000}", flush=True)
    print(f"handing over with adapters, ms = {handed_s * 1000}", flush=True)


def _load(turns: Turns, made: Sequence[Made]) -> list[str]:
    from worker.engine.orders import Point, Provide

    turns.take(*(Provide(str(each.path), each.manifest) for each in made))
    turns.take(*(Point(each.manifest.name, each.manifest.version) for each in made))
    wanted, until = {each.manifest.id for each in made}, time.monotonic() + 120
    while not wanted <= turns.slots.stats.loaded.keys():
        assert time.monotonic() < until and not turns.slots.stats.failed, turns.slots.stats
        turns.take()
        time.sleep(0.005)
    return [each.manifest.id for each in made]


def _submit(rows: Sequence[str], length: int, tokens: int, at: int) -> Any:
    """Rows of these adapters."""
    from shared.sequences import SamplingParams, SequenceSpec
    from worker.engine.messages import RowRequest
    from worker.engine.orders import Submit

    params = SamplingParams(tokens, 0, temperature=0.0, ignore_eos=True)
    specs = [
        SequenceSpec(
            f"{at}-{row}",
            "m",
            tuple((31 * row + 7 * id_ + at) % 4000 for id_ in range(length)),
            params,
            adapter=adapter,
        )
        for row, adapter in enumerate(rows)
    ]
    return Submit([RowRequest(spec) for spec in specs])


def prompt_ms(turns: Turns, length: int) -> float:
    """From a prompt's arrival to its first token, the least of a few."""
    times = []
    for at in range(4):
        began = time.perf_counter()
        events = turns.take(_submit([""], length, 1, at))
        while not events:
            events = turns.take()
        times.append(time.perf_counter() - began)
    return min(times) * 1000


def _step_s(turns: Turns, rows: list[str]) -> tuple[float, float, float, int]:
    """Seconds of a decode step, those that the thread works, those of giving operations out; turns that were taken."""
    from worker.engine.orders import Cancel

    order = _submit(rows, PROMPT, TOKENS, 1000 + len(rows))
    turns.take(order)
    taken, events = 1, ()
    while len(events) < len(rows):
        events = turns.take()
        taken += 1
    for _ in range(WARM):
        turns.take()
    times, worked = [], time.thread_time()
    with handing_over() as handed:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _ in range(STEPS // ROUNDS):
                turns.take()
            times.append((time.perf_counter() - began) / (STEPS // ROUNDS))
    worked = time.thread_time() - worked
    turns.take(*(Cancel(request.spec.id, "cancelled") for request in order.requests))
    return median(times), worked / STEPS, handed[0] / STEPS, taken + WARM + STEPS


if __name__ == "__main__":
    main()
