"""The example for an autoscaler asks for metrics and a stream that exist."""

import re
from pathlib import Path

import yaml

from shared.redis import keys
from shared.telemetry.metrics import CATALOGUE

FILE = Path(__file__).parents[2] / "deploy/kubernetes/keda.yaml"


def test_its_triggers_name_our_metrics_their_labels_and_our_stream() -> None:
    scaled, authentication = yaml.safe_load_all(FILE.read_text())
    triggers = {trigger["type"]: trigger for trigger in scaled["spec"]["triggers"]}
    assert triggers.keys() == {"redis-streams", "prometheus"}
    stream = triggers["redis-streams"]["metadata"]
    assert (stream["stream"], stream["consumerGroup"]) == (keys.queue("tiny", "interactive"), keys.GROUP)
    assert triggers["redis-streams"]["authenticationRef"]["name"] == authentication["metadata"]["name"]
    for name, labels in re.findall(r"(mlx_parallm_\w+)\{(.*?)\}", triggers["prometheus"]["metadata"]["query"]):
        assert set(re.findall(r"(\w+)=", labels)) <= set(CATALOGUE[name].labels)
    assert all(isinstance(value, str) for trigger in triggers.values() for value in trigger["metadata"].values())
