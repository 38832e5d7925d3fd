"""lm-eval's local-completions on multiple choice: every log-likelihood equals mlx_lm's own evaluator to 1e-4."""

import json
import os
import random
import tempfile
from importlib.metadata import version
from pathlib import Path

import lm_eval
import lm_eval.models  # before mlx_lm registers its own, or these are never found
import mlx.core as mx
from lm_eval.tasks import TaskManager
from mlx_lm.evaluate import MLXLM

TASK = """
task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: label
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


def write_task(folder: Path) -> TaskManager:
    """Forty sums with four choices each."""
    draw = random.Random(0)
    with (folder / "sums.jsonl").open("w") as file:
        for _ in range(40):
            a, b = draw.randrange(10, 60), draw.randrange(10, 40)
            choices = [str(a + b + off) for off in (0, 1, 10, -1)]
            draw.shuffle(choices)
            line = {"question": f"{a}+{b}=", "choices": choices, "label": choices.index(str(a + b))}
            file.write(json.dumps(line) + "\n")
    (folder / "sums.yaml").write_text(TASK.format(file=folder / "sums.jsonl"))
    return TaskManager(include_path=str(folder), include_defaults=False)


def likelihoods(model: object, manager: TaskManager, arguments: str | None = None) -> tuple[list[float], float]:
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=["sums"], task_manager=manager, log_samples=True, batch_size=8
    )
    samples = sorted(found["samples"]["sums"], key=lambda sample: sample["doc_id"])
    flat = [float(choice[0]) for sample in samples for choice in sample["filtered_resps"]]
    return flat, found["results"]["sums"]["acc,none"]


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    manager = write_task(folder)
    path = os.environ["PARALLM_MODEL_DIR"]
    ours, accuracy = likelihoods(
        "local-completions",
        manager,
        f"model={os.environ['PARALLM_MODEL_NAME']},base_url={os.environ['PARALLM_URL']}/v1/completions,"
        f"tokenizer={path},tokenizer_backend=huggingface,num_concurrent=4,tokenized_requests=True",
    )
    reference = MLXLM(path, use_chat_template=False)
    reference._model.set_dtype(mx.float32)  # as our worker computes on a CPU
    theirs, their_accuracy = likelihoods(reference, manager)
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    assert len(ours) == 160 and worst < 1e-4, worst
    assert accuracy == their_accuracy
    print(f"lm-eval {version('lm_eval')}: 160 log-likelihoods, largest difference {worst:.1e}, accuracy {accuracy}")


main()
