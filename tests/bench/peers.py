"""What ours is measured against, each in a process of its own, with the BLAS and the graph settings that a worker has.

`python -m tests.bench.peers rate MODEL TOKENS DTYPE`: raw mlx-lm's tok/s; a line of prompts in, a line of figures out.
`python -m tests.bench.peers memory MODEL`: its resident bytes with 32 rows.
`python -m tests.bench.peers serve MODEL PORT`: `mlx_lm.server`.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from mlx_model import fast_blas


def raw_model(folder: str, dtype: str) -> tuple[Any, Any]:
    """A model of mlx-lm whose rows end at their number of tokens alone."""
    import mlx.core as mx
    from mlx_lm import load

    model, tokenizer, *_ = load(folder)
    model.set_dtype(getattr(mx, dtype))
    tokenizer._eos_token_ids = set()
    return model, tokenizer


def rate(folder: str, tokens: str, dtype: str) -> None:
    from mlx_model import cuda_graphs

    cuda_graphs.prepare()
    from mlx_lm import batch_generate

    model, tokenizer = raw_model(folder, dtype)
    for line in sys.stdin:
        prompts = json.loads(line)
        rows = {"completion_batch_size": len(prompts), "prefill_batch_size": min(len(prompts), 32)}
        began = time.perf_counter()
        response = batch_generate(model, tokenizer, prompts, max_tokens=int(tokens), **rows)
        print(json.dumps({"tokens": response.stats.generation_tokens, "s": time.perf_counter() - began}), flush=True)


def memory(folder: str) -> None:
    import psutil
    from mlx_lm import batch_generate

    model, tokenizer = raw_model(folder, "float32")
    batch_generate(model, tokenizer, [[5] * 16] * 32, max_tokens=64)
    print(psutil.Process().memory_info().rss)


def serve(folder: str, port: str) -> None:
    import mlx_lm.server

    sys.argv = ["mlx_lm.server", "--model", folder, "--port", port, "--decode-concurrency", "32"]
    sys.argv += ["--prompt-concurrency", "8", "--log-level", "ERROR"]
    mlx_lm.server.main()


PROGRAMS: dict[str, Callable[..., None]] = {"rate": rate, "memory": memory, "serve": serve}

if __name__ == "__main__":
    fast_blas.install()  # before MLX is imported
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
