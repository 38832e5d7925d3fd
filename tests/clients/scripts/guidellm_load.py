"""GuideLLM, the vLLM project's load generator: no request fails, and it counts the tokens that our metrics count."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

URL, MODEL = os.environ["PARALLM_URL"], os.environ["PARALLM_MODEL_NAME"]
STREAMS = (1, 4, 16)
REQUESTS = 64  # at each
PROMPT, OUTPUT = 64, 64  # tokens
QUIET = {"GUIDELLM__MAX_WORKER_PROCESSES": "1", "GUIDELLM__LOGGING__CONSOLE_LOG_LEVEL": "WARNING"}
COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


def generate(folder: Path) -> list[dict]:
    """Its report: one benchmark a number of streams."""
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run",
        "--backend", f"kind=openai_http,target={URL},model={MODEL}",
        "--profile", "kind=concurrent,streams=1", "--override", "profile.streams", ",".join(map(str, STREAMS)),
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={os.environ['PARALLM_MODEL_DIR']}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "--output", f"kind=json,path={folder}/report.json", "--disable-console",
    ]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, **QUIET})
    return json.loads((folder / "report.json").read_text())["benchmarks"]


def counted() -> list[float]:
    """What the server has counted since its start."""
    text = urllib.request.urlopen(f"{URL}/metrics").read().decode()
    found = (re.search(rf'^{name}{{model_name="{MODEL}"}} (\S+)$', text, re.MULTILINE) for name in COUNTERS)
    return [float(match[1]) if match else 0.0 for match in found]


def settled() -> list[float]:
    """The same, once no process has anything more to tell."""
    before, deadline = counted(), time.monotonic() + 30
    while time.monotonic() < deadline:
        time.sleep(5)
        now = counted()
        if now == before:
            return now
        before = now
    raise AssertionError("the counters do not come to rest")


def show(benchmarks: list[dict]) -> None:
    print("| streams | requests/s | output tok/s | first token p50 / p95, ms | between tokens p50 / p95, ms |")
    print("|---|---|---|---|---|")
    for streams, benchmark in zip(STREAMS, benchmarks, strict=True):
        figures = benchmark["metrics"]
        rate, tokens = (
            figures[name]["successful"]["mean"] for name in ("requests_per_second", "output_tokens_per_second")
        )
        first, gap = (
            figures[f"{name}_ms"]["successful"]["percentiles"]
            for name in ("time_to_first_token", "inter_token_latency")
        )
        print(
            f"| {streams} | {rate:.1f} | {tokens:,.0f} | {first['p50']:.0f} / {first['p95']:.0f} "
            f"| {gap['p50']:.1f} / {gap['p95']:.1f} |"
        )  # fmt: skip


def main() -> None:
    before = settled()
    with tempfile.TemporaryDirectory() as folder:
        benchmarks = generate(Path(folder))
    requests = [benchmark["requests"] for benchmark in benchmarks]
    done = [request for each in requests for request in each["successful"]]
    assert not any(each["errored"] or each["incomplete"] for each in requests)
    assert [len(each["successful"]) for each in requests] == [REQUESTS] * len(STREAMS)
    theirs = [sum(request[name] for request in done) for name in ("prompt_tokens", "output_tokens")]
    ours = [now - then for now, then in zip(settled(), before, strict=True)]
    assert theirs == ours, (theirs, ours)
    assert theirs[1] == OUTPUT * len(done), "every completion has the length that was asked for"
    show(benchmarks)
    counts = f"{ours[0]:.0f} + {ours[1]:.0f} tokens, as the server counts"
    print(f"guidellm {version('guidellm')}: {len(done)} requests whole, {counts}")


main()
