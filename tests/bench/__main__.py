"""`make bench`: every measurement, one after another. Run it on a machine that has nothing else to do."""

import argparse
import subprocess
import sys
import time

MEASUREMENTS = {
    "frames": "token frames through Redis: flood rate, publish to receive",
    "api_cost": "CPU of the api per streamed token",
    "engine": "the engine against mlx-lm's BatchGenerator",
    "decode_steps": "decode steps of each family with few operations or compiled layers, over mlx-lm's forward",
    "structured": "a batch of 8 in which 0, 4 or 8 rows follow a JSON schema",
    "forced_calls": "forced calls with varied schemas: how many are valid",
    "replay": "tokens that another worker computes again: how many are the same, and the gaps of the others",
    "served": "over HTTP, against raw mlx-lm and mlx_lm.server",
    "classes": "first tokens of interactive requests, idle and beside a batch that fills the worker",
    "memory": "memory of api and worker over 10,000 streamed requests",
    "adapters": "decode steps with 1, 4 and 8 adapters; the pause of a hot load",
    "hosted": "a trainer in the engine's thread: what decoding keeps, what training gets, memory",
    "hosted_learners": "learners in the worker that serves: what streams keep of their speed, learners of theirs",
    "learners": "16 learners of a training service at once over one with equal tokens; their memory",
    "trainers": "two processes that share one run's train steps over one",
    "federation": "two runs whose data stays apart, averaged every few steps, against one with all of it",
    "model_switches": "a host that holds several models in turn: first tokens of cold ones, memory, other rows' gaps",
    "start": "from a worker's start until it is ready, has answered and is warm, without compiled kernels and with",
    "prefix": "a second request on a prefix, a group of samples, and prompts that share nothing",
    "turns": "a second turn of a chat over a cold prompt, for layers of each kind",
    "agent_turns": "later turns of Claude Code, Codex and opencode over their first ones, as these have sent them",
    "disk": "a second turn after a restart, from disk; what running streams notice of reads and writes",
    "shared_prompts": "rows that store and read their prompt once, over copies: memory, steps, a job",
    "group_training": "train steps of groups: a prompt with each sample, once and copied, once and read in place",
    "routing": "log-probabilities of sampler and trainer of a mixture of experts, with routing replay and without",
    "invariance": "rows whose bits do not depend on one another: decode steps and prompts, over rows without that",
    "kv_bits": "KV in 8 and 4 bits: rows in the same memory, and decode speed over full precision",
    "speculation": "rows with drafts over rows without, by how often drafts are right",
    "images": "rows with images together over one at a time; first tokens of texts beside them",
    "draft_model": "rows with a draft model over rows without: the model itself, and a part of it",
    "curricula": "train steps to the same held-out reward with a curriculum, over without",
    "cart_pole": "PPO holds a pole on a cart, over a ring: a worker acts, the trainer publishes versions",
    "nights": "what corrections of a simulated user teach in nights, what is forgotten, what the gate keeps out",
    "court": "tokens that a faulty worker writes until others have found it wrong, by fault and share",
    "epochs": "a job's second epoch over the first one's prompts, with what it wrote remembered over without",
    "transfers": "a leaving worker's long row: the wait for its next token elsewhere, with KV transfer and without",
    "overload": "goodput and first tokens at four times the sustainable rate; 1,000 streams",
    "slow_readers": "gaps of streams beside hundreds of readers that hardly read, over none and over readers that read",
    "admission": "requests that meet their first token's deadline in overload: by predicted time, by queue limits",
    "redis_scaling": "how many workers and apis one Redis carries: simulated workers with a timed model",
    "scale": "what one Redis carries of 1,000 workers and 100 apis, in slower time; the cost of each kind of work",
    "adapter_publish": "from a publish to the first token of the new version at each of 2 workers",
    "adapter_flight": "token frames while 100 MB of adapter are in flight",
    "placement": "what many models on few machines serve in time, over all that is asked for, simulated",
    "splits": "regret of splits whose shares move, over fixed ones, simulated",
    "traces": "requests and streams with OpenTelemetry traces absent, off, on for one in ten, on for all",
}


def main(argv: list[str] | None = None) -> int:
    """Run those named on the command line, or all; 1 when one of them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description=f"{__doc__}\n\n" + "\n".join(f"  {name:16} {what}" for name, what in MEASUREMENTS.items()),
        epilog="python -m tests.bench.NAME --help tells the options of those that have any.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="*", help="measurements to run; default: all")
    chosen = parser.parse_args(argv).name or list(MEASUREMENTS)
    if unknown := [name for name in chosen if name not in MEASUREMENTS]:
        parser.error(f"no measurement is named {', '.join(unknown)}; there are: {', '.join(MEASUREMENTS)}")
    failed = []
    for name in chosen:
        print(f"\n== {name}: {MEASUREMENTS[name]}", flush=True)
        began = time.monotonic()
        if subprocess.run([sys.executable, "-m", f"tests.bench.{name}"], check=False).returncode:
            failed.append(name)
        print(f"   ({time.monotonic() - began:.0f} s)", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
