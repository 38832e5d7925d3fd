"""Keys and values of prompts in a train step, with gradients: rows that continue the prompts copy them, or read them
where they are.

Prompts and the rows behind them take a forward pass each, or one together (`OnePass`), which starts half as many
operations.

Shape suffixes: P prompts, S their positions, B rows, T the positions of these that are fed, N pieces, W positions of a
piece, D numbers of a head.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from mlx_model.kv.padded import Masks, PaddedRead, PartsRead
from mlx_model.kv.shared import Form, Groups, Pair, SharedRead, read_of, with_queries

MOST_PARTS = 8  # prompts whose keys are copied for their rows one by one; of more, by an index


class PromptKeys:
    """Keys and values of left-padded prompts in one layer, growing by concatenation so that gradients pass through.

    It has the part of mlx-lm's cache protocol that a model's forward pass uses; `offset` is a number per row.
    """

    def __init__(self, padding_P: mx.array, window: int | None = None, masks: Masks | None = None) -> None:
        """`window`: positions that a query sees, its own among them; None: all.

        `masks`: attention is computed by MLX's fused kernels, whose masks these are; None: as MLX chooses.
        """
        self.padding_P, self.window, self._masks = padding_P, window, masks
        self.offset = -padding_P
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array | PaddedRead, mx.array]:
        """Append, and return everything so far."""
        self.offset = self.offset + keys.shape[2]
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        return (keys if self._masks is None else PaddedRead(keys, values, self._masks)), values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """A causal mask that hides the padding from all but itself.

        A query that sees nothing would have gradients that are not finite on CUDA (0 times NaN, for nobody reads it).
        """
        seen = 0 if self.keys is None else self.keys.shape[2]
        window = window_size or self.window
        mask: mx.array = create_causal_mask(N, seen, window_size=window, left_padding=self.padding_P)
        return mask | (mx.arange(seen, seen + N)[:, None] == mx.arange(seen + N))

    @property
    def nbytes(self) -> int:
        assert self.keys is not None and self.values is not None
        return self.keys.nbytes + self.values.nbytes

    def continued(self, groups: Groups, starts: Sequence[int], form: Form) -> "Continued":
        """The cache of rows that continue these prompts and read them where they are; `starts`: of each prompt."""
        assert self.keys is not None and self.values is not None
        keys, values = self.keys, self.values
        places = [(slice(at, at + 1), slice(None), slice(start, None)) for at, start in enumerate(starts)]
        prompts: dict[Hashable, Pair] = {
            at: (keys[of], values[of]) for at, of in enumerate(places) if at in groups.keys
        }
        return Continued(groups, prompts, form)

    def branch(self, prompt_of_B: mx.array) -> "PromptKeys":
        """The cache of rows that continue these prompts."""
        assert self.keys is not None and self.values is not None
        unseen = max(0, self.keys.shape[2] - self.window) if self.window else 0
        twin = PromptKeys(self.padding_P[prompt_of_B] - unseen, self.window, self._masks)
        twin.offset = self.offset[prompt_of_B]
        rows: list[int] = prompt_of_B.tolist()  # type: ignore[assignment]
        twin.keys, twin.values = (copied(each[:, :, unseen:], rows) for each in (self.keys, self.values))
        return twin


class OnePass:
    """Prompts [P, S] and the rows [B, T] that continue them, cut into pieces [N, W] for one forward pass.

    S and T are the `lengths`. This is the cache of all layers in that pass: attention gets each layer's keys, in which
    rows have those of their prompts.
    """

    def __init__(self, padding_P: mx.array, prompt_of_B: mx.array, lengths: tuple[int, int]) -> None:
        self._padding_P, self._prompt_of_B, self._lengths = padding_P, prompt_of_B, lengths
        self._width = math.gcd(*lengths)
        self._end = len(padding_P) * lengths[0] // self._width
        self._masks = Masks()
        prompts = PromptKeys(padding_P)
        first, seen = prompts.offset, prompts.make_mask(lengths[0])
        prompts.update_and_fetch(*[mx.zeros((len(padding_P), 1, lengths[0], 1))] * 2)
        rows = prompts.branch(prompt_of_B)
        self._seen = seen, rows.make_mask(lengths[1])
        begins = zip((first, rows.offset), lengths, strict=True)
        self.offset = mx.concatenate(
            [(begin[:, None] + mx.arange(0, length, self._width)).flatten() for begin, length in begins]
        )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PartsRead, mx.array]:
        """The pieces' keys and values [N, heads, W, D], in the form that attention reads."""
        prompt, rows = zip(self.apart(keys), self.apart(values), strict=True)
        prompts = PromptKeys(self._padding_P, masks=self._masks)
        first, _ = prompts.update_and_fetch(*prompt)
        rest, _ = prompts.branch(self._prompt_of_B).update_and_fetch(*rows)
        assert isinstance(first, PaddedRead) and isinstance(rest, PaddedRead)
        return PartsRead((first, rest), self._seen, self.apart, self.joined), values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """None: attention has the masks of both parts."""
        if return_array or window_size is not None:
            raise NotImplementedError("a mask of pieces")

    def apart(self, array: mx.array) -> list[mx.array]:
        """An array [N, ..., W, D] as [P, ..., S, D] and [B, ..., T, D]."""
        parts = zip((array[: self._end], array[self._end :]), self._lengths, strict=True)
        cut = [mx.unflatten(part, 0, (-1, length // self._width)) for part, length in parts]
        return [mx.moveaxis(part, 1, -3).flatten(-3, -2) for part in cut]

    def joined(self, parts: Sequence[mx.array]) -> mx.array:
        """Arrays [P, ..., S, D] and [B, ..., T, D] as [N, ..., W, D]."""
        cut = [mx.unflatten(part, -2, (-1, self._width)) for part in parts]
        return mx.concatenate([mx.moveaxis(part, -3, 1).flatten(0, 1) for part in cut])


class Continued:
    """The cache of rows that continue prompts, in one layer and for one forward pass (mlx_model/kv/shared.py)."""

    def __init__(self, groups: Groups, prompts: dict[Hashable, Pair], form: Form) -> None:
        self._groups, self._prompts, self._form = groups, prompts, form
        self.offset = mx.array([prompts[prompt][0].shape[2] for (prompt,) in groups.chains])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[SharedRead, mx.array]:
        """The rows' keys and values, in the form that attention reads with the prompts'."""
        return read_of(SharedRead(self._groups, self._prompts, (keys, values), self._form, learns=True))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """A causal mask of the rows' own positions."""
        if window_size is not None:
            raise NotImplementedError("a window over positions that rows share")
        mask: mx.array = create_causal_mask(N)[None, None]
        if self._form == "keys":
            return mask
        _, rotary_keys = next(iter(self._prompts.values()))
        return with_queries(mask, rotary_keys.shape[3])


def copied(of_prompts: mx.array, prompts: Sequence[int]) -> mx.array:
    """An array [prompts, ...] as [rows, ...], where each row has that of its prompt.

    The gradient of an index adds row by row to the same numbers, which takes a GPU far longer than a sum over rows.
    """
    counts = Counter(prompts)
    if list(prompts) != sorted(prompts) or len(counts) > MOST_PARTS:
        return of_prompts[mx.array(list(prompts))]
    if len(set(counts.values())) == 1 and max(counts) == len(counts) - 1:
        return mx.repeat(of_prompts[: len(counts)], counts[0], axis=0)
    parts = [
        mx.broadcast_to(of_prompts[at : at + 1], (count, *of_prompts.shape[1:])) for at, count in sorted(counts.items())
    ]
    return mx.concatenate(parts)
