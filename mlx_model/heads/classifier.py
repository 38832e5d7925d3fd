"""Classifiers and reward models as Hugging Face stores them: a language model's body with `score.weight` added.

`config.json` names a `...ForSequenceClassification`, and says how many labels there are and what they are called. Such
a model is loaded as mlx-lm's language model of its type, and `score` becomes its own head: a scalar one when there is
one label, else one of labels. It has no output layer, so what it would write means nothing: its input embeddings stand
in for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx_lm.utils

from mlx_model.heads.head import Head, Tensors, layer
from shared.errors import SetupError
from shared.heads import HeadSpec

SCORE = "score"
_BODY = {"tie_word_embeddings": True}  # there is no output layer in the file


def is_classifier(config: dict[str, Any]) -> bool:
    """True if config.json describes a sequence classifier."""
    return any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or ())


class Classifier:
    """Loads a classifier by mlx-lm's classes; `score` is taken out of the weights before the model sees them."""

    def __init__(self, config: dict[str, Any]) -> None:
        if config.get("problem_type") == "multi_label_classification":
            raise SetupError("a classifier of which several labels may hold at once is not served")
        self._config = config
        self._tensors: Tensors = {}

    def load(self, path: Any) -> tuple[Any, dict[str, Any]]:
        """The model without its head, its weights not read yet, and its config."""
        model, config = mlx_lm.utils.load_model(path, True, model_config=_BODY, get_model_classes=self._classes)
        return model, config

    def heads(self, hidden_size: int) -> dict[str, Head]:
        """The classifier's head, named `score`; SetupError if it does not fit the model or the labels."""
        weight = self._tensors.get(f"{SCORE}.weight")
        if weight is None or set(self._tensors) - {f"{SCORE}.weight", f"{SCORE}.bias"}:
            found = ", ".join(sorted(self._tensors)) or f"no {SCORE}.weight"
            raise SetupError(f"a classifier with {found}: {SCORE}.weight is read, and {SCORE}.bias")
        try:
            spec = self._spec(weight.shape[0], hidden_size)
        except ValueError as error:
            raise SetupError(f"the classifier's labels: {error}") from error
        if weight.shape != (spec.outputs, hidden_size):
            raise SetupError(f"{SCORE}.weight has shape {weight.shape}, expected {(spec.outputs, hidden_size)}")
        for name, tensor in self._tensors.items():
            if not mx.isfinite(tensor).all().item():
                raise SetupError(f"{name} holds a value that is not finite")
        return {SCORE: Head(spec, layer(self._tensors, SCORE))}

    def _spec(self, outputs: int, hidden_size: int) -> HeadSpec:
        names = self._config.get("id2label") or {}
        if self._config.get("num_labels", outputs) != outputs or (names and len(names) != outputs):
            raise ValueError(f"config.json does not name as many as {SCORE}.weight has outputs, which is {outputs}")
        if outputs == 1:
            return HeadSpec("scalar", inputs=hidden_size)
        if self._config.get("problem_type") == "regression":
            raise ValueError(f"a regression of {outputs} numbers is not served")
        labels = tuple(str(names.get(str(at), f"LABEL_{at}")) for at in range(outputs))
        return HeadSpec("labels", labels=labels, inputs=hidden_size)

    def _classes(self, config: dict[str, Any]) -> tuple[type, type]:
        model, arguments = mlx_lm.utils._get_classes(config)
        body = type(model.__name__, (model,), {"sanitize": _sanitize(model, self._tensors)})
        body.__module__ = model.__module__  # by which batching.py knows it
        return body, arguments


def _sanitize(model: Any, taken: Tensors) -> Callable[[Any, dict[str, mx.array]], dict[str, mx.array]]:
    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        taken.update({key: weights.pop(key) for key in list(weights) if key.startswith((f"{SCORE}.", "classifier."))})
        return model.sanitize(self, weights) if hasattr(model, "sanitize") else weights

    return sanitize
