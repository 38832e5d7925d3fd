"""Heads: small networks on a model's last hidden state, described without code.

A **head** reads one vector, the hidden state (behind the model's last norm) of the last token of a text, and gives one
number (`scalar`), one for each of some labels (`labels`), or what a policy says of actions: a logit for each of those
that it names (`categorical`), or the means and then the log-stds of some numbers (`gaussian`). It is linear, or has one
hidden layer. Its tensors lie in a safetensors file, `heads.NAME.weight` and so on (shared/adapter_files/heads.py); this
is the rest of it. It stands in `adapter_config.json` under `heads`, in the manifest of an adapter version, and on the
card of a model that has heads of its own.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from shared.errors import InvalidRequestError

HeadKind = Literal["scalar", "labels", "categorical", "gaussian"]
Activation = Literal["", "gelu", "relu", "silu", "tanh"]

MAX_HEADS = 16
MAX_LABELS = 1024
MAX_ACTION = 1024  # numbers of a gaussian head's action
MAX_HIDDEN = 16_384
MAX_WEIGHTS = 1 << 24  # of one head, 64 MiB: decoding waits while they are multiplied
MAX_LABEL = 256  # characters
REWARD, VALUE, POLICY = "reward", "value", "policy"  # the names by which rewards, values and actions are looked for
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")


class HeadSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Definition of a head, without its weights."""

    kind: HeadKind
    labels: tuple[str, ...] = ()  # kinds "labels" and "categorical": one for each output, in order
    activation: Activation = ""  # after the hidden layer; "": there is none, the head is linear
    pooling: Literal["last"] = "last"  # which position's hidden state it reads
    inputs: int = 0  # the model's hidden size; 0 in a file: what its tensors have
    hidden: int = 0  # width of the hidden layer; 0: none
    size: int = 0  # kind "gaussian": numbers in an action; its outputs are their means, then their log-stds

    def __post_init__(self) -> None:
        if self.kind in ("labels", "categorical"):
            _check_labels(self.labels, self.kind)
        elif self.labels:
            raise ValueError("labels belong to a head of kind 'labels' or 'categorical'")
        if self.kind == "gaussian" and not 1 <= self.size <= MAX_ACTION:
            raise ValueError(f"a head of kind 'gaussian' has a size of 1 to {MAX_ACTION}, here is {self.size}")
        if self.kind != "gaussian" and self.size:
            raise ValueError("a size belongs to a head of kind 'gaussian'")
        if self.inputs < 0 or not 0 <= self.hidden <= MAX_HIDDEN:
            raise ValueError(f"inputs must be positive, hidden 0 to {MAX_HIDDEN}")
        weights = self.hidden * (self.inputs + self.outputs) or self.inputs * self.outputs
        if weights > MAX_WEIGHTS:
            raise ValueError(f"it has {weights:,} weights; a head may have {MAX_WEIGHTS:,}")

    @property
    def outputs(self) -> int:
        """Number of values that the head computes."""
        return len(self.labels) or 2 * self.size or 1


Heads = Mapping[str, HeadSpec]


def check_fields(names: Iterable[str]) -> None:
    """ValueError for a field that a description of a head does not have: a reader of manifests passes over those."""
    if unknown := sorted(set(names) - set(HeadSpec.__struct_fields__)):
        raise ValueError(f"unknown field {unknown[0][:80]!r}; a head has {', '.join(HeadSpec.__struct_fields__)}")


def check_heads(heads: Heads) -> None:
    """ValueError for names that are none, or too many of them."""
    if len(heads) > MAX_HEADS:
        raise ValueError(f"{len(heads)} heads; at most {MAX_HEADS} are taken")
    for name in heads:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is no name of a head: a small letter, then small letters, digits or '_'")


def choose_policy(heads: Heads, name: str = "") -> str:
    """The head that acts: `name`, else the one that is called `policy`; "" when there is none that gives actions."""
    spec = heads.get(name or POLICY)
    return (name or POLICY) if spec is not None and spec.kind in ("categorical", "gaussian") else ""


def choose(heads: Heads, kind: HeadKind, name: str = "", *, usual: str = "") -> str:
    """The name of the head that is meant: `name`, else the one that is called `usual`, else the only one of its kind.

    "" when there is none; InvalidRequestError when it is not clear which is meant.
    """
    fitting = sorted(head for head, spec in heads.items() if spec.kind == kind)
    if name:
        return name if name in fitting else ""
    if usual in fitting or len(fitting) < 2:
        return usual if usual in fitting else "".join(fitting)
    raise InvalidRequestError(f"several heads of kind '{kind}': name one of {', '.join(fitting)}", param="head")


def _check_labels(labels: tuple[str, ...], kind: HeadKind) -> None:
    if not 2 <= len(labels) <= MAX_LABELS:
        raise ValueError(f"a head of kind '{kind}' has 2 to {MAX_LABELS} of them, here are {len(labels)}")
    if len(set(labels)) < len(labels):
        raise ValueError("two labels are the same")
    if any(not 1 <= len(label) <= MAX_LABEL for label in labels):
        raise ValueError(f"a label has 1 to {MAX_LABEL} characters")
