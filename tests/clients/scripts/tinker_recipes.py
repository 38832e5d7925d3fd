"""tinker-cookbook's own recipes, as they are: only the address and the model's name are others.

sl_loop, rl_loop, a supervised chat run, a preference run (DPO) and an RL environment. The recipes know a model's
renderer by its name, so the ring has its model under the name of one that they know, and what they would fetch from
the hub (its tokenizer, three data sets) stands in folders of these names, which the hub's libraries look at first.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

URL, SOURCE = os.environ["PARALLM_URL"], Path(os.environ["PARALLM_MODEL_DIR"])
MODEL = "meta-llama/Llama-3.2-1B"  # tests/clients/__main__.py makes it another name of the tiny model
CONFIGS = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""


def sums(count: int) -> list[tuple[str, str]]:
    return [(f"What is {i % 7} + {i % 5}?", str(i % 7 + i % 5)) for i in range(count)]


def put(folder: Path, rows: list[dict]) -> None:
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def lay_out(folder: Path) -> None:
    """What stands at the hub otherwise."""
    (folder / MODEL).mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(SOURCE / file, folder / MODEL)
    chats = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in sums(64)
    ]
    put(folder / "HuggingFaceH4" / "no_robots", chats)
    pairs = [
        {"chosen": f"\n\nHuman: {asked}\n\nAssistant: {said}", "rejected": f"\n\nHuman: {asked}\n\nAssistant: no"}
        for asked, said in sums(64)
    ]
    put(folder / "Anthropic" / "hh-rlhf", pairs)
    gsm8k = folder / "openai" / "gsm8k"
    put(gsm8k, [{"question": asked, "answer": f"so it is\n#### {said}"} for asked, said in sums(32)])
    (gsm8k / "README.md").write_text(CONFIGS)
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


RECIPES = {
    "sl_loop": ("batch_size=16", "learning_rate=1e-2", "lora_rank=8", "max_length=64"),
    "rl_loop": ("batch_size=8", "group_size=4", "lora_rank=8", "max_tokens=8", "loss_fn=importance_sampling"),
    "chat_sl.train": (
        *("dataset=chats.jsonl", "batch_size=16", "learning_rate=1e-2", "lora_rank=8", "max_length=64", "save_every=2"),
    ),
    "preference.dpo.train": ("dataset=hhh", "batch_size=16", "learning_rate=1e-3", "max_length=64"),
    "math_rl.train": (
        *("env=arithmetic", "group_size=4", "groups_per_batch=8", "lora_rank=8", "learning_rate=1e-3", "max_tokens=4"),
        *("loss_fn=importance_sampling", "save_every=2"),
    ),
}
STEPS = 3
TIMEOUT_S = 1800  # of one of them; most of its time it imports PyTorch


def run(folder: Path, recipe: str) -> list[dict]:
    """The metrics of a recipe's steps."""
    log = folder / "logs" / recipe
    given = [f"base_url={URL}", f"model_name={MODEL}", f"log_path={log}", f"max_steps={STEPS}", *RECIPES[recipe]]
    if "." in recipe:
        given.append("behavior_if_log_dir_exists=delete")
    environment = {**os.environ, "TINKER_API_KEY": "tml-any", "HF_HOME": str(folder / "hub" / recipe)}
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", *given]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{recipe}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        lay_out(folder)
        found = dict(zip(RECIPES, pool.map(lambda recipe: run(folder, recipe), RECIPES), strict=True))
        checkpoints = {
            recipe: (folder / "logs" / recipe / "checkpoints.jsonl").read_text().count("tinker://")
            for recipe in RECIPES
        }
    for recipe, lines in found.items():
        print(f"| {recipe} | {lines[-1]}"[:400])
        assert checkpoints[recipe] > 0, f"{recipe} has saved nothing"
        assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float)), (
            recipe
        )
    print(f"tinker-cookbook: {', '.join(RECIPES)}")


main()
